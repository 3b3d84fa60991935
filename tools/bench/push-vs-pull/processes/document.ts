import { availableParallelism } from "node:os";
import { gainOf, type Measured, PROCESSES, type ThreadTimes, WAYS } from "../ways.js";
import { BLOCK_TOKENS, FORWARD_MS_PER_512, KV_BYTES_PER_TOKEN, nameOf } from "../workload.js";

/** The first cells of the two tables of processor time. */
export const MAIN_THREADS = "JavaScript threads";
export const OTHER_THREADS = "other threads";

/** Comes before the time of a hop. */
export const HOP = "A message of 500 bytes to another process that has slept for 10 ms takes ";

/**
 * The text of docs/bench/push-vs-pull.md. `load`: the load average of the machine; `failed`:
 * requests that failed; `hopMs`: as `hopMs()` measures it.
 */
export function document(
  measured: readonly Measured[],
  run: { rounds: number; load: { before: number; after: number }; failed: number; hopMs: number },
): string {
  const { rounds, load, failed } = run;
  const rows = measured.map((each) => {
    const { point, ttftMs, boundMs, localMs } = each;
    const { pull, push, "push, layer-wise": layers } = ttftMs;
    const floor = localMs ?? boundMs;
    const gains = [gainOf(each, "push"), gainOf(each, "push, layer-wise")];
    const cells = [pull, push, layers, floor, ...gains, pull - floor, push - floor];
    return `| ${nameOf(point)} | ${cells.map((cell, i) => cell.toFixed(i === 4 || i === 5 ? 2 : 1)).join(" | ")} |`;
  });
  const costTable = (threads: keyof ThreadTimes) => {
    const rows = measured.flatMap(({ point, costs }) =>
      WAYS.map((way) => {
        const { requestMs, tokenMs } = costs[way];
        const cells = [
          ...PROCESSES.map((name) => requestMs[threads][name].toFixed(2)),
          ...PROCESSES.map((name) => tokenMs[threads][name].toFixed(3)),
        ];
        return `| ${nameOf(point)}, ${way} | ${cells.join(" | ")} |`;
      }),
    );
    return `| ${threads === "main" ? MAIN_THREADS : OTHER_THREADS} | ${PROCESSES.map((name) => `${name}, request`).join(" | ")} | ${PROCESSES.map((name) => `${name}, token`).join(" | ")} |
| --- |${" ---: |".repeat(2 * PROCESSES.length)}
${rows.join("\n")}`;
  };
  const busy =
    load.before > availableParallelism()
      ? `
The load was above the number of cores, so the times are mostly waits for a core. They show that the harness runs and that no request fails. They do not show how close push comes to the bound.
`
      : "";
  return `# Push and pull, measured

Written by \`npm run bench -- push-vs-pull --record\`. Time to the first token in ms. The proxy, P and D are separate processes on one host, over NIXL with UCX. Each value is the
median of ${rounds} rounds, in which pull, push and layer-wise push took turns. The model is simulated: a forward pass of ${FORWARD_MS_PER_512} ms per 512 tokens,
${KV_BYTES_PER_TOKEN / 1024} KiB of KV per token, blocks of ${BLOCK_TOKENS} tokens. Load of the machine (2 cores): ${load.before.toFixed(1)} before, ${load.after.toFixed(1)} after; ${failed} requests failed and are not counted.
${busy}
The bound is the time of the forward pass plus the time of one READ of the same bytes in the same blocks, measured in this run. It does not include HTTP, the proxy and
the engines' own steps. For several requests at once it is the bound of the median request. For a full prefix hit it is the time that D needs without P.
The ratios are ratios of medians. All of them include P's forward passes, so push can be better by a factor of pull ÷ bound at most.

The sample has the points of a grid of 192 that vary one dimension at a time, and prompts as of \`vllm bench serve --dataset-name sonnet\`: 550 tokens, of which all prompts share the first 200, and 150 of output.
A hit is what D has in its prefix cache; the shared tokens are always there.

| input→output | pull | push | layer-wise | bound | pull ÷ push | pull ÷ layer-wise | pull − bound | push − bound |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
${rows.join("\n")}

![The table as a bar chart](push-vs-pull.svg)

## Processor time

The time of the two cores that a request takes, in ms: for itself and its first token, and for each further token. Medians of the same rounds, as the kernel counts it. A request waits for
the JavaScript threads; the other threads (of the agents, of the copies of bytes, of V8's compiler and collector) work beside them. [The simulation](push-vs-pull-links.md) computes with both.

${HOP}${run.hopMs.toFixed(3)} ms.

${costTable("main")}

${costTable("beside")}

[Where the time goes](push-vs-pull-profile.md).
`;
}
