import type { ConnectorModule, KvCacheKind } from "@kv/interface";
import { type SeededRandom, seededRandom } from "@kv/transport-memory";
import type { SimEngine } from "../simulator/sim-engine.js";
import { createScenario } from "./scenario.js";

export interface MatrixCase {
  readonly p: number;
  readonly stages?: number;
  readonly d: number;
  readonly blocks: readonly [prefill: number, decode: number];
  readonly heads: number;
  readonly kind?: KvCacheKind;
  readonly fromHndToNhd?: boolean;
  readonly permutesLocalKv?: boolean;
}

export interface MatrixPair {
  readonly prefill: SimEngine;
  readonly decode: SimEngine;
  readonly random: SeededRandom;
  sleep(ms: number): Promise<void>;
  /** None, one block, two blocks, or all. */
  cachedTokens(n: number, numTokens: number): number;
}

/** Nothing is held one second later, long before a lease would end. */
export async function expectAllArrive(
  { p, stages = 1, d, blocks, heads, kind, fromHndToNhd = false, permutesLocalKv }: MatrixCase,
  options: {
    readonly seed: string;
    readonly requests: number;
    readonly connector: ConnectorModule;
    readonly extra?: Readonly<Record<string, unknown>>;
    one(n: number, pair: MatrixPair): Promise<unknown>;
  },
): Promise<void> {
  const { connector, extra = {} } = options;
  const random = seededRandom(
    `matrix ${p} ${stages} ${d} ${blocks.join(" ")} ${heads}${options.seed}`,
  );
  const play = createScenario({ connector, random, jitterMs: 2 });
  const both = {
    numLayers: stages === 1 ? 2 : 5,
    numKvHeads: heads,
    kind,
    numBlocks: 128,
    extra,
  };
  const layout = fromHndToNhd ? ({ layout: "LBNHC", permutesLocalKv } as const) : {};
  const prefill = await play.engine("p", {
    ...both,
    tpSize: p,
    ppSize: stages,
    blockSize: blocks[0],
    skewMs: 5_000_000,
  });
  const decode = await play.engine("d", { ...both, ...layout, tpSize: d, blockSize: blocks[1] });
  const cachedTokens = (n: number, numTokens: number) =>
    Math.min(([0, 1, 2, Number.POSITIVE_INFINITY][n % 4] ?? 0) * blocks[1], numTokens);
  const pair: MatrixPair = { prefill, decode, random, sleep: play.sleep, cachedTokens };
  await play.clock.settle(
    Promise.all(Array.from({ length: options.requests }, (_, n) => options.one(n, pair))),
  );
  await play.end(1000);
}
