import { z } from "zod";
import { latenciesOf } from "./latencies.js";
import type { LeakReport } from "./leaks.js";
import type { LoadResult } from "./load.js";

const latencies = z
  .object({ count: z.int(), p50Ms: z.number(), p90Ms: z.number(), p99Ms: z.number(), maxMs: z.number() })
  .optional();
/** What `kv-peer decode --json` prints. */
export const loadReportSchema = z.object({
  version: z.literal(1),
  verdict: z.enum(["ok", "fail"]),
  reasons: z.array(z.string()).describe("Why it failed: each a limit and what was found."),
  server: z.object({
    url: z.string(),
    engineId: z.string(),
    tpSize: z.int(),
    vllmVersion: z.string().optional(),
  }),
  requests: z.object({
    sent: z.int(),
    ok: z.int(),
    aborted: z.int().describe("On purpose."),
    unnotified: z.int().describe("Read, and on purpose not said to be."),
    failed: z.int(),
    failures: z
      .record(z.string(), z.object({ count: z.int(), message: z.string() }))
      .describe("By error code."),
  }),
  elapsedMs: z.number(),
  requestsPerSecond: z.number(),
  lengthBytes: z.number(),
  prefill: latencies,
  pull: latencies,
  leaks: z
    .object({
      before: z.number(),
      afterTold: z.number(),
      atEnd: z.number(),
      heldAlthoughTold: z.number(),
      leaked: z.number(),
      freedMs: z.number().optional(),
      allFreedMs: z.number().optional(),
      expiredRequests: z.number(),
    })
    .optional()
    .describe("Absent where the server's metrics do not tell of its blocks."),
});
export type LoadReport = z.infer<typeof loadReportSchema>;

export interface Gate {
  readonly maxFailed: number;
  readonly maxLeakedBlocks: number;
  readonly maxPullP99Ms?: number;
  /** Whether a server whose metrics do not tell of its blocks passes. */
  readonly allowUnknownLeaks?: boolean;
}

export function loadReport(
  result: LoadResult,
  server: { readonly url: string; readonly vllmVersion: string | undefined },
  gate: Gate,
): LoadReport {
  const { pulls, leaks, elapsedMs } = result;
  const of = (outcome: string) => pulls.filter((pull) => pull.outcome === outcome);
  const failures: Record<string, { count: number; message: string }> = {};
  for (const { code = "KV_INTERNAL", message = "" } of of("failed")) {
    failures[code] = { count: (failures[code]?.count ?? 0) + 1, message: failures[code]?.message ?? message };
  }
  const pull = latenciesOf(pulls.flatMap(({ pullMs }) => (pullMs === undefined ? [] : [pullMs])));
  const prefill = latenciesOf(
    pulls.filter(({ prefillMs }) => prefillMs > 0).map(({ prefillMs }) => prefillMs),
  );
  const reasons = reasonsOf(result, of("failed").length, pull?.p99Ms, gate);
  return {
    version: 1,
    verdict: reasons.length === 0 ? "ok" : "fail",
    reasons,
    server: {
      url: server.url,
      engineId: result.engineId,
      tpSize: result.tpSize,
      ...(server.vllmVersion === undefined ? {} : { vllmVersion: server.vllmVersion }),
    },
    requests: {
      sent: pulls.length,
      ok: of("ok").length,
      aborted: of("aborted").length,
      unnotified: pulls.filter(({ fault }) => fault === "no-notify").length,
      failed: of("failed").length,
      failures,
    },
    elapsedMs,
    requestsPerSecond: elapsedMs > 0 ? (pulls.length * 1000) / elapsedMs : 0,
    lengthBytes: pulls.reduce((sum, { lengthBytes }) => sum + lengthBytes, 0),
    ...(prefill === undefined ? {} : { prefill }),
    ...(pull === undefined ? {} : { pull }),
    ...(leaks === undefined ? {} : { leaks: leaksOf(leaks) }),
  };
}

function leaksOf({ freedMs, allFreedMs, ...rest }: LeakReport): NonNullable<LoadReport["leaks"]> {
  return {
    ...rest,
    ...(freedMs === undefined ? {} : { freedMs }),
    ...(allFreedMs === undefined ? {} : { allFreedMs }),
  };
}

function reasonsOf(
  { leaks, pulls }: LoadResult,
  failed: number,
  p99Ms: number | undefined,
  { maxFailed, maxLeakedBlocks, maxPullP99Ms, allowUnknownLeaks = false }: Gate,
): string[] {
  const reasons: string[] = [];
  if (pulls.length === 0) reasons.push("no request was sent");
  if (failed > maxFailed) reasons.push(`${failed} requests failed, at most ${maxFailed} may`);
  if (leaks === undefined && !allowUnknownLeaks)
    reasons.push("nothing is known of leaks: the server's /metrics did not tell of its blocks");
  if (leaks !== undefined && leaks.heldAlthoughTold > maxLeakedBlocks) {
    reasons.push(
      `${leaks.heldAlthoughTold} blocks were held although the server was told that they were read`,
    );
  }
  if (leaks !== undefined && leaks.leaked > maxLeakedBlocks) {
    reasons.push(`${leaks.leaked} blocks were not free after their lease, at most ${maxLeakedBlocks} may`);
  }
  if (maxPullP99Ms !== undefined && (p99Ms ?? Number.POSITIVE_INFINITY) > maxPullP99Ms) {
    reasons.push(
      `p99 of reading is ${p99Ms?.toFixed(1) ?? "not known"} ms, at most ${maxPullP99Ms} may it be`,
    );
  }
  return reasons;
}
