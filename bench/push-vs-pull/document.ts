import { availableParallelism } from "node:os";
import { median } from "../report.js";
import { gainOf, WAYS } from "./deployments.js";
import type { Measured } from "./index.js";
import { BLOCK_TOKENS, FORWARD_MS_PER_512, KV_BYTES_PER_TOKEN, nameOf } from "./workload.js";

/** The page with the table, as Markdown. */
export function document(
  measured: readonly Measured[],
  run: { rounds: number; load: { before: number; after: number }; failed: number },
): string {
  const { rounds, load, failed } = run;
  const rows = measured.map(({ point, ttftMs, boundMs, localMs }) => {
    const [pull = 0, push = 0, layers = 0] = WAYS.map((way) => median(ttftMs[way]));
    const floor = localMs ?? boundMs;
    const gains = [gainOf(ttftMs, "push"), gainOf(ttftMs, "push, layer-wise")];
    const cells = [pull, push, layers, floor, ...gains, pull - floor, push - floor];
    return `| ${nameOf(point)} | ${cells.map((cell, i) => cell.toFixed(i === 4 || i === 5 ? 2 : 1)).join(" | ")} |`;
  });
  const busy =
    load.before > availableParallelism()
      ? `
The machine had more load than cores, so that waiting for a core dominates. These figures show that the harness runs and that nothing fails; they do not show whether push
stays within the bound.
`
      : "";
  return `# Push and pull, measured

Written by \`npm run bench -- push-vs-pull\`. Time to the first token in ms, through proxy, P and D as processes of their own, over NIXL with UCX on
one host; medians of ${rounds} rounds, in each of which pull, push and layer-wise push took turns. The model is simulated: a forward pass of ${FORWARD_MS_PER_512} ms per 512 tokens,
${KV_BYTES_PER_TOKEN / 1024} KiB of KV per token, blocks of ${BLOCK_TOKENS} tokens. Load of the machine (2 cores): ${load.before.toFixed(1)} before, ${load.after.toFixed(1)} after; ${failed} requests failed and are not counted.
${busy}
The bound is the forward pass plus the bytes divided by the bandwidth of one READ of as many bytes in the same blocks in this run. It leaves out HTTP, the proxy and
the engines' own steps. For several requests at once it is the bound of the median request; for a full prefix hit it is D's own time.
The ratios are ratios of medians. All of them contain P's forward passes: push can be at most pull ÷ bound times better.

The sample is ${measured.length} of 192 points: those that differ in one dimension at a time.

| input→output | pull | push | layer-wise | bound | pull ÷ push | pull ÷ layer-wise | pull − bound | push − bound |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
${rows.join("\n")}

![The same as bars](push-vs-pull.svg)

[Where the time goes](push-vs-pull-profile.md), measured by hand once.
`;
}
