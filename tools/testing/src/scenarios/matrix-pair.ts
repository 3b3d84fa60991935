import type { ConnectorModule, KvCacheKind } from "@kv/interface";
import { memoryNetwork, type SeededRandom, seededRandom, virtualClock } from "@kv/transport-memory";
import { expect } from "vitest";
import { createSimEngine, type SimEngine } from "../simulator/sim-engine.js";

/**
 * One pair of engines in a connector's test matrix: TP sizes, block sizes, and KV heads of the
 * model.
 */
export interface MatrixCase {
  readonly p: number;
  /** Pipeline stages of P. */
  readonly stages?: number;
  readonly d: number;
  readonly blocks: readonly [prefill: number, decode: number];
  readonly heads: number;
  /** Kind of all layers; "full" by default. */
  readonly kind?: KvCacheKind;
  /** True if P's blocks are HND and D's NHD. */
  readonly fromHndToNhd?: boolean;
  /** `enable_permute_local_kv` of D. */
  readonly permutesLocalKv?: boolean;
}

export interface MatrixPair {
  readonly prefill: SimEngine;
  readonly decode: SimEngine;
  readonly random: SeededRandom;
  sleep(ms: number): Promise<void>;
  /**
   * Number of prompt tokens of the n-th request that D already has: none, one block, two blocks, or
   * all tokens.
   */
  cachedTokens(n: number, numTokens: number): number;
}

/**
 * Runs `requests` requests at once between two engines in virtual time. Expects that the engines
 * hold nothing one second later, long before a lease would end.
 */
export async function expectAllArrive(
  { p, stages = 1, d, blocks, heads, kind, fromHndToNhd = false, permutesLocalKv }: MatrixCase,
  options: {
    readonly seed: string;
    readonly requests: number;
    readonly connector: ConnectorModule;
    /** `kv_connector_extra_config` of both. Default: none. */
    readonly extra?: Readonly<Record<string, unknown>>;
    one(n: number, pair: MatrixPair): Promise<unknown>;
  },
): Promise<void> {
  const clock = virtualClock();
  const random = seededRandom(
    `matrix ${p} ${stages} ${d} ${blocks.join(" ")} ${heads}${options.seed}`,
  );
  const network = memoryNetwork({
    clock,
    random,
    latency: { latencyMs: 1, jitterMs: 2, minPieces: 3 },
  });
  const violations: string[] = [];
  const numLayers = stages === 1 ? 2 : 5;
  const engine = (
    hostName: string,
    tpSize: number,
    ppSize: number,
    blockSize: number,
    skewMs: number,
  ) =>
    createSimEngine({
      ...(fromHndToNhd && hostName === "d" ? { layout: "LBNHC", permutesLocalKv } : {}),
      network,
      hostName,
      tpSize,
      ppSize,
      numLayers,
      blockSize,
      skewMs,
      numKvHeads: heads,
      kind,
      numBlocks: 128,
      connector: options.connector,
      extra: options.extra ?? {},
      engineId: `${hostName}-engine`,
      violation: (what) => void violations.push(what),
    });
  const prefill = await engine("p", p, stages, blocks[0], 5_000_000);
  const decode = await engine("d", d, 1, blocks[1], 0);
  const pair: MatrixPair = {
    prefill,
    decode,
    random,
    sleep: (ms) => new Promise<void>((resolve) => void clock.setTimer(resolve, ms)),
    cachedTokens: (n, numTokens) =>
      Math.min(([0, 1, 2, Number.POSITIVE_INFINITY][n % 4] ?? 0) * blocks[1], numTokens),
  };
  await clock.settle(
    Promise.all(Array.from({ length: options.requests }, (_, n) => options.one(n, pair))),
  );
  await clock.advance(1000);
  expect(violations).toEqual([]);
  for (const each of [prefill, decode]) {
    expect(Object.entries(each.outstanding()).filter(([, count]) => count !== 0)).toEqual([]);
  }
  await clock.settle(Promise.all([prefill.close(), decode.close()]));
  expect(Object.values(network.outstanding()).filter((count) => count !== 0)).toEqual([]);
  expect(clock.pendingTimers).toBe(0);
}
