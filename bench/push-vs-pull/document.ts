import { availableParallelism } from "node:os";
import { median } from "../report.js";
import { WAYS } from "./contestants.js";
import { gainOf } from "./gain.js";
import { nameOf } from "./grid.js";
import type { Measured } from "./index.js";
import { BLOCK_TOKENS, FORWARD_MS_PER_512, KV_BYTES_PER_TOKEN } from "./model.js";

/** The page with the table. */
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
The machine was busier than it has cores: waiting for a core is most of what was measured. These figures say that the harness runs and that nothing fails; whether push keeps
to the bound they do not say.
`
      : "";
  return `# Push and pull, measured

Written by \`npm run bench -- push-vs-pull\`. Time to the first token in ms, through proxy, P and D as processes of their own, over NIXL with UCX on
one host; medians of ${rounds} rounds, in which pull, push and layer-wise push took turns. The model is simulated: a forward pass of ${FORWARD_MS_PER_512} ms per 512 tokens,
${KV_BYTES_PER_TOKEN / 1024} KiB of KV per token, blocks of ${BLOCK_TOKENS} tokens. Load of the machine (2 cores): ${load.before.toFixed(1)} before, ${load.after.toFixed(1)} after; ${failed} requests failed and are left out.
${busy}
The bound is the forward pass plus the bytes divided by the bandwidth that one READ of as many bytes in the same blocks had in this run; HTTP, the proxy and
the engines' own steps are not in it. Of requests at once it is that of the one in the middle. Of a full prefix hit it is what D needs by itself.
The ratios are those of the medians. What P's passes take is in all of them: push can be no more than pull ÷ bound times better.

The sample is ${measured.length} of 192 points: those in which one thing at a time is changed.

| input→output | pull | push | layer-wise | bound | pull ÷ push | pull ÷ layer-wise | pull − bound | push − bound |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
${rows.join("\n")}

![The same as bars](push-vs-pull.svg)

[Where the time goes](push-vs-pull-profile.md), measured by hand once.
`;
}
