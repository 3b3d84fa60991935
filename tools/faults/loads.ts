import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import type { FaultLoad, FaultRunReport } from "@kv/testing/faults/fault-run";
import { expect } from "vitest";
import { REAL_CLOCK_TIMEOUTS } from "./timeouts.js";

export const requests = Number(process.env.KV_ADDON_REQUESTS ?? 200);
/** Decides which operation gets which fault. The timing depends on the machine. */
export const seed = process.env.KV_SEED ?? "addon";

const LOAD = { requests, seed, clients: 24, times: REAL_CLOCK_TIMEOUTS, deathEvery: 80 };
export const LOADS: Readonly<Record<"pull" | "push", FaultLoad>> = {
  pull: { ...LOAD, connector: pullConnector },
  push: { ...LOAD, connector: pushConnector, atOnce: 0.6, numBlocks: 192, layerwise: true },
};

export const CLEAN_END = `${requests} requests: each ends with the right bytes or a typed error, and nothing stays registered, held or in flight`;

export function expectCleanEnd(report: FaultRunReport, load: FaultLoad): void {
  console.info(JSON.stringify(report));
  expect(report.violations).toEqual([]);
  expect(report.left).toEqual({});
  const total = Object.values(report.outcomes).reduce((sum, count) => sum + count, 0);
  expect(total).toBe(load.requests);
  // A connector that refuses everything would pass the rest.
  expect(report.outcomes.ok ?? 0).toBeGreaterThan(load.requests * 0.3);
  expect(report.kills).toBeGreaterThan(0);
}
