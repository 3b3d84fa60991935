import { availableParallelism } from "node:os";
import { median } from "../report.js";
import { WAYS } from "./contestants.js";
import { gainOf } from "./gain.js";
import { nameOf } from "./grid.js";
import type { Measured } from "./index.js";
import { BLOCK_TOKENS, FORWARD_MS_PER_512, KV_BYTES_PER_TOKEN } from "./model.js";

/** Taken by hand, by lines on stderr at each of these places. */
const PROFILE = `## Where the time goes

One deployment alone, pull, one request at a time, medians of 30, in ms from when the client begins:

| | 128 tokens | 2,048 tokens |
| --- | ---: | ---: |
| P's engine has the request (client, proxy, P's HTTP) | 3.5 | 3.9 |
| the forward pass is done, all KV in P's pool | 5.4 | 24.6 |
| D's engine has the request (P's answer, proxy, D's HTTP) | 8.2 | 28.6 |
| the READ is planned | 8.9 | 29.8 |
| the READ is done | 10.2 | 34.0 |
| P has said that it held the blocks until now | 11.7 | 35.5 |
| D's engine has made the first token | 13.2 | 36.5 |
| the client has it | 16.1 | 39.9 |

The transfer is at its bound. The other 13 ms are eight hops between four processes, each of which has slept: a hop takes 0.1 to 0.3 ms to wake the next process on these virtual
cores, and what it does there it does with cold caches (the same 128 tokens take 23 ms where two more deployments ran in between, as in the table). Of these hops only the question whether
the blocks were held is the connector's. A bound that leaves 3 ms for all of it is not kept here.

With 16 at once two cores are the limit: the 16 requests of 1,024 tokens are read and handed on before the first pass can end (40 to 55 ms), and each pass of 10 ms takes 12 to 13, as D's
steps, the proxy and the client run on the same cores. Pull does half of that work while P computes, push does all of it at the start, when both legs leave. So most of what push saves, the way back through
the proxy, is spent again on waiting for a core, and the ratio stays below 1.2.
`;

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

${PROFILE}`;
}
