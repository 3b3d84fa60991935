import { type Row, rowOf } from "../../report.js";
import { gainOf } from "../ways.js";
import { nameOf } from "../workload.js";
import { decodePathSection } from "./decode-path.js";
import { AT_ONCE, HOPS_MS, LINKS_GBITS, MODEL, type Swept } from "./sweep.js";
import type { Compared } from "./validate.js";

const PUSHES = ["push", "push, layer-wise"] as const;

const twice = (each: Swept | undefined): string =>
  each === undefined ? "-" : PUSHES.map((way) => gainOf(each, way).toFixed(2)).join(", ");

/** The text of docs/bench/push-vs-pull-links.md. */
export function document(swept: readonly Swept[], compared: readonly Compared[]): string {
  const off = (one: Compared) => Math.abs(one.virtualMs / one.realMs - 1);
  const within = (is: (one: Compared) => boolean) => {
    const some = compared.filter(is);
    return `${some.filter((one) => off(one) <= 0.15).length} of ${some.length}`;
  };
  return `# Push and pull on other links

Written by \`npm run bench -- push-vs-pull --only links,validate --record\`. Time to the first token on hardware that was simulated: the proxy, the pull and push connectors and the engines' schedulers are the production code, in one process, over the embedded transport, on a
virtual clock. Every message between two processes (HTTP, notification, question on the side channel, begin of a transfer) takes one hop; transfers share the link; each byte range costs 0.2 us. P computes one prompt
at a time, with ${MODEL.forwardMsPer512Tokens} ms per 512 tokens and ${MODEL.kvBytesPerToken / 1024} KiB of KV per token, as a model of 8 billion parameters on one GPU. D's own steps take no time in the tables of gains; [the source's second cause](#the-sources-two-causes) needs them. The figures repeat exactly.

Each cell has two gains: how many times longer pull takes than push, and than layer-wise push.

## Requests at once

Prompts of 1,024 tokens that no cache has.

${table(
  swept,
  ({ point, hitsAt }) => plain({ point, hitsAt }) && point.inputTokens === 1024,
  AT_ONCE,
  ({ point }) => point.atOnce,
  (n) => `${n} at once`,
)}

## Length of the prompt

One request at a time.

${table(
  swept,
  ({ point, hitsAt }) => plain({ point, hitsAt }) && point.atOnce === 1,
  [128, 1024, 4096],
  ({ point }) => point.inputTokens,
  (n) => `${n} tokens`,
)}

## Prefix hits

A part of each prompt of 1,024 tokens is in D's cache (P computes all of it), or in P's cache (D has none of it). A hit of 100 % leaves one token.

${hitTable(swept)}

## Fragmented pools

Blocks that are scattered: 2,080 byte ranges for a prompt instead of 32.

${table(
  swept,
  ({ point }) => point.pool === "fragmented",
  [1, 16],
  ({ point }) => point.atOnce,
  (n) => `${n} at once`,
)}

## Where push is worth it, and why

F is P's forward pass, B the bytes divided by the bandwidth, h a hop. For one request

- pull takes F + B + 9 h: client, proxy, P, proxy, D (4), READ (1), the question whether P held the blocks (2), D, proxy, client (2)
- push takes F + B + 6 h: client, proxy, P (2), WRITE and its notification (2), D, proxy, client (2)
- layer-wise push takes max(F, B) + min(F, B) ÷ layers + 6 h, about: the bytes move while P computes

${thresholds(swept)}

Four effects make the gains:

- Push saves three hops. That is worth 1.2 only where three hops are a fifth of the rest: prompts of 128 tokens on hops of half a millisecond come to 1.16, longer prompts to less.
- Layer-wise push hides the bytes behind the forward pass, or the pass behind the bytes. The gain is largest where both take the same time, and below 2. It shrinks with the requests at once, because then a
  request mostly waits for other prompts, during which pull moves its bytes too.
- With both legs at once, a D that has the whole prompt answers without P. Pull asks P first and waits for a forward pass that nothing needs: any gain, 2 and 3 included, by the ratio of F to h. A proxy that knows D's cache (\`prefixAware\` with
  KV events, or \`--disaggregate-above\`) sends such a prompt to D alone, and the gain is gone.
- When P has the prompts in its cache, many requests are ready at once. Pulls then share the link and all end late; P writes a push after the other, so the median request ends at two thirds of the time: 1.33. A limit of concurrent READs at D
  would give pull the same.

A gain of 3 by the transfer itself is in none of these points: F and B are the same for both.

${decodePathSection()}
## Against real processes

The same simulation with the parameters of the machine that [push-vs-pull](push-vs-pull.md) was measured on: the bandwidth in its bounds, 5 ms per 512 tokens, 8 KiB per token, the time of a message between two processes, and two cores as
a resource that the client, the proxy, P and D share: what a request and each token of its answer take of them in each process is measured there. A request waits for the JavaScript threads; other threads only take a core meanwhile. Work waits for a
core in the order in which it comes. Nothing is fitted to the times of pull and push, but one choice was made by them: where both wait for a core, the other threads come first (61 figures; JavaScript
first: 59). Within 15 % are
${within(({ point }) => point.atOnce === 1 && point.pool === "contiguous")} figures with one request at a time and contiguous pools, ${within(({ point }) => point.atOnce === 1 && point.pool === "fragmented")} with fragmented ones, ${within(({ point }) => point.atOnce === 16)} with 16 requests at once, and ${within(({ point }) => point.atOnce === 4 || point.atOnce === 64)} with 4 and 64.

Real runs agree with one another no better. Of four runs of the same code, any two agreed within 15 % in 58 to 64 of 75 figures, and of two later runs of it in 59. The simulation agrees with the run that its parameters come from in 61, and with
the mean of those two in 60; all its figures together are 3 % below that mean, and its pulls at one request at a time 1.5 % above. Two kinds differ in both runs: 16 pulls at once of 550 tokens are 17 to 24 % too short, and a push of a prompt
that D has, which P's work does not delay, a third too long.

| point | way | real ms | virtual ms | virtual ÷ real |
| --- | --- | ---: | ---: | ---: |
${compared.map((one) => `| ${nameOf(one.point)} | ${one.way} | ${one.realMs.toFixed(1)} | ${one.virtualMs.toFixed(1)} | ${(one.virtualMs / one.realMs).toFixed(2)} |`).join("\n")}
`;
}

/**
 * The rows of the report: each point of the sweep, and each of the simulation against the
 * processes.
 */
export function linkRows(swept: readonly Swept[], compared: readonly Compared[]): readonly Row[] {
  const rows = swept.map((each) => {
    const { linkGbits, hopMs, hitsAt, point, ttftMs } = each;
    const what = `${linkGbits} Gb/s, ${hopMs} ms: ${nameOf(point)} at ${hitsAt}: pull / push, pull / layer-wise`;
    const pushes = `${ttftMs.push.toFixed(2)}, ${ttftMs["push, layer-wise"].toFixed(2)} ms`;
    const gain = Math.max(...PUSHES.map((way) => gainOf(each, way)));
    return rowOf(what, [pushes, `${ttftMs.pull.toFixed(2)} ms`], gain);
  });
  const ofProcesses = compared.map(({ way, point, realMs, virtualMs }) => {
    const shown = [`${virtualMs.toFixed(1)} ms`, `${realMs.toFixed(1)} ms`] as const;
    const row = rowOf(`${way}, ${nameOf(point)}: virtual / real`, shown, virtualMs / realMs);
    return { ...row, wanted: "0.85 to 1.15", met: Math.abs(virtualMs / realMs - 1) <= 0.15 };
  });
  return [...rows, ...ofProcesses];
}

function plain({ point, hitsAt }: Pick<Swept, "point" | "hitsAt">): boolean {
  return point.hitPercent === 0 && point.pool === "contiguous" && hitsAt === "decode";
}

function table<T>(
  swept: readonly Swept[],
  where: (each: Swept) => boolean,
  columns: readonly T[],
  columnOf: (each: Swept) => T,
  title: (column: T) => string,
): string {
  const rows = LINKS_GBITS.flatMap((linkGbits) =>
    HOPS_MS.map((hopMs) => {
      const ofRow = swept.filter(
        (each) => each.linkGbits === linkGbits && each.hopMs === hopMs && where(each),
      );
      const cells = columns.map((column) => twice(ofRow.find((each) => columnOf(each) === column)));
      return `| ${linkGbits} Gb/s, ${hopMs} ms | ${cells.join(" | ")} |`;
    }),
  );
  return [
    `| link, hop | ${columns.map(title).join(" | ")} |`,
    `| --- |${" ---: |".repeat(columns.length)}`,
    ...rows,
  ].join("\n");
}

function hitTable(swept: readonly Swept[]): string {
  const columns = (["decode", "prefill"] as const).flatMap((hitsAt) =>
    [50, 100].flatMap((hitPercent) => [1, 16].map((atOnce) => ({ hitsAt, hitPercent, atOnce }))),
  );
  const keyOf = (each: { hitsAt: string; hitPercent: number; atOnce: number }) =>
    `${each.hitPercent} % at ${each.hitsAt === "decode" ? "D" : "P"}, ${each.atOnce} at once`;
  return table(
    swept,
    ({ point }) => point.hitPercent > 0,
    columns.map(keyOf),
    ({ hitsAt, point }) => keyOf({ hitsAt, hitPercent: point.hitPercent, atOnce: point.atOnce }),
    (key) => key,
  );
}

/** For each gain, how many of the points have it, and which. */
function thresholds(swept: readonly Swept[]): string {
  const rows = [1.2, 2, 3].flatMap((wanted) =>
    PUSHES.map((way) => {
      const having = swept.filter((each) => gainOf(each, way) >= wanted);
      const groups = new Map<string, { count: number; links: Set<number>; hops: Set<number> }>();
      for (const { point, hitsAt, linkGbits, hopMs } of having) {
        const hit =
          point.hitPercent === 0
            ? ""
            : `, ${point.hitPercent} % at ${hitsAt === "decode" ? "D" : "P"}`;
        const name = `${point.inputTokens} tokens${hit}${point.pool === "fragmented" ? ", fragmented" : ""}, ${point.atOnce} at once`;
        const group = groups.get(name) ?? { count: 0, links: new Set(), hops: new Set() };
        group.count += 1;
        group.links.add(linkGbits);
        group.hops.add(hopMs);
        groups.set(name, group);
      }
      const names = Array.from(groups, ([name, { links, hops }]) => {
        const everywhere = links.size === LINKS_GBITS.length && hops.size === HOPS_MS.length;
        return everywhere
          ? name
          : `${name} (${rangeOf([...links], " Gb/s")}, hops ${rangeOf([...hops], " ms")})`;
      });
      return `| ${wanted} | ${way} | ${having.length} of ${swept.length} | ${names.join("; ") || "nowhere"} |`;
    }),
  );
  return ["| gain | way | points | where |", "| ---: | --- | ---: | --- |", ...rows].join("\n");
}

function rangeOf(values: readonly number[], unit: string): string {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  return least === most ? `${least}${unit}` : `${least} to ${most}${unit}`;
}
