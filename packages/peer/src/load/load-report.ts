import { z } from "zod";
import { leakSchema } from "./block-leaks.js";
import type { LoadResult } from "./load.js";

const latencies = z
  .object({
    count: z.int(),
    p50Ms: z.number(),
    p90Ms: z.number(),
    p99Ms: z.number(),
    maxMs: z.number(),
  })
  .optional();

/** What `kv-peer decode --json` prints. */
export const loadReportSchema = z.object({
  version: z.literal(1),
  verdict: z.enum(["ok", "fail"]),
  reasons: z
    .array(z.string())
    .describe("Why the verdict is fail: one limit each, with the measured value."),
  server: z.object({
    url: z.string(),
    engineId: z.string(),
    tpSize: z.int(),
    vllmVersion: z.string().optional(),
  }),
  requests: z.object({
    sent: z.int(),
    ok: z.int(),
    aborted: z.int().describe("Aborted on purpose."),
    unnotified: z.int().describe("Read, but P was not notified on purpose."),
    failed: z.int(),
    failures: z
      .record(z.string(), z.object({ count: z.int(), message: z.string() }))
      .describe("By error code, with the first message."),
  }),
  elapsedMs: z.number(),
  requestsPerSecond: z.number(),
  lengthBytes: z.number().describe("Bytes of KV that arrived."),
  prefill: latencies.describe("From sending a prompt to the answer of P."),
  pull: latencies.describe("From the answer of P to the arrival of the KV."),
  leaks: leakSchema.optional().describe("Absent when the server's metrics do not show its blocks."),
});

/** The parsed form of `kv-peer decode --json`. */
export type LoadReport = z.infer<typeof loadReportSchema>;

/** The limits of a load; exceeding one gives the verdict `fail`. */
export interface LoadLimits {
  readonly maxFailed: number;
  /** At P, of notified requests and at the end. */
  readonly maxLeakedBlocks: number;
  /** Limit of receiving KV in ms. @default no limit */
  readonly maxPullP99Ms?: number | undefined;
  /** Passes a server whose metrics do not show its blocks. @default false */
  readonly allowUnknownLeaks?: boolean | undefined;
}

/** Compares a load with its limits. */
export function loadReport(
  result: LoadResult,
  server: { readonly url: string; readonly vllmVersion: string | undefined },
  limits: LoadLimits,
): LoadReport {
  const { pulls, leaks, elapsedMs } = result;
  const of = (outcome: string) => pulls.filter((pull) => pull.outcome === outcome);
  const failures: Record<string, { count: number; message: string }> = {};
  for (const { code = "KV_INTERNAL", message = "" } of of("failed")) {
    failures[code] = {
      count: (failures[code]?.count ?? 0) + 1,
      message: failures[code]?.message ?? message,
    };
  }
  const pull = latenciesOf(pulls.flatMap(({ pullMs }) => (pullMs === undefined ? [] : [pullMs])));
  const prefill = latenciesOf(
    pulls.filter(({ prefillMs }) => prefillMs > 0).map(({ prefillMs }) => prefillMs),
  );
  const reasons = exceededLimits(result, of("failed").length, pull?.p99Ms, limits);
  return {
    version: 1,
    verdict: reasons.length === 0 ? "ok" : "fail",
    reasons,
    server: {
      url: server.url,
      engineId: result.engineId,
      tpSize: result.tpSize,
      vllmVersion: server.vllmVersion,
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
    prefill,
    pull,
    leaks,
  };
}

function latenciesOf(samplesMs: readonly number[]): LoadReport["pull"] {
  if (samplesMs.length === 0) return undefined;
  const sorted = [...samplesMs].sort((a, b) => a - b);
  const at = (share: number) => sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] ?? 0;
  return { count: sorted.length, p50Ms: at(0.5), p90Ms: at(0.9), p99Ms: at(0.99), maxMs: at(1) };
}

function exceededLimits(
  { leaks, pulls }: LoadResult,
  failed: number,
  p99Ms: number | undefined,
  { maxFailed, maxLeakedBlocks, maxPullP99Ms, allowUnknownLeaks = false }: LoadLimits,
): string[] {
  const reasons: string[] = [];
  if (pulls.length === 0) reasons.push("no request was sent");
  if (failed > maxFailed) reasons.push(`${failed} requests failed; the limit is ${maxFailed}`);
  if (leaks === undefined && !allowUnknownLeaks)
    reasons.push("leaks are unknown: the server's /metrics do not show its blocks");
  if (leaks !== undefined && leaks.heldAlthoughTold > maxLeakedBlocks) {
    reasons.push(
      `${leaks.heldAlthoughTold} blocks were not freed after their read notification; the limit is ${maxLeakedBlocks}`,
    );
  }
  if (leaks !== undefined && leaks.leaked > maxLeakedBlocks) {
    reasons.push(
      `${leaks.leaked} blocks were not free after their lease; the limit is ${maxLeakedBlocks}`,
    );
  }
  if (maxPullP99Ms !== undefined && (p99Ms ?? Number.POSITIVE_INFINITY) > maxPullP99Ms) {
    reasons.push(
      `the p99 of reading is ${p99Ms?.toFixed(1) ?? "unknown"} ms; the limit is ${maxPullP99Ms} ms`,
    );
  }
  return reasons;
}

/** Latencies, the server's blocks, failures, and the verdict last. */
export function loadText({
  server,
  requests,
  leaks,
  verdict,
  reasons,
  ...report
}: LoadReport): string {
  const { prefill, pull, elapsedMs, lengthBytes } = report;
  const version = server.vllmVersion === undefined ? "" : `, vLLM ${server.vllmVersion}`;
  const seconds = elapsedMs / 1000;
  const lines = [
    `${server.url}: engine ${server.engineId}, TP ${server.tpSize}${version}`,
    "",
    `requests   ${requests.sent} in ${seconds.toFixed(1)} s (${report.requestsPerSecond.toFixed(2)}/s): ${requests.ok} ok, ` +
      `${requests.aborted} aborted, ${requests.unnotified} not notified, ${requests.failed} failed`,
    `bytes      ${(lengthBytes / 2 ** 20).toFixed(1)} MiB read, ${(lengthBytes / 1e6 / Math.max(seconds, 0.001)).toFixed(1)} MB/s over the run`,
    "",
    "ms              p50       p90       p99       max",
    ...[["prefill", prefill] as const, ["read", pull] as const].map(([name, found]) =>
      found === undefined
        ? `${name.padEnd(8)}  none`
        : name.padEnd(9) +
          [found.p50Ms, found.p90Ms, found.p99Ms, found.maxMs]
            .map((ms) => ms.toFixed(1).padStart(10))
            .join(""),
    ),
    "",
    ...leakLines(leaks),
    ...Object.entries(requests.failures).map(
      ([code, { count, message }]) => `failed     ${count} × ${code}: ${message}`,
    ),
    "",
    verdict === "ok" ? "ok: every limit was kept" : `fail: ${reasons.join("; ")}`,
  ];
  return `${lines.join("\n")}\n`;
}

function leakLines(leaks: LoadReport["leaks"]): string[] {
  if (leaks === undefined)
    return ["leaks      unknown: the server's /metrics do not show its blocks"];
  const seconds = (ms: number | undefined) =>
    ms === undefined ? "never freed" : `freed after ${(ms / 1000).toFixed(1)} s`;
  return [
    `blocks     ${leaks.before} in use before, ${leaks.afterTold} after the read notifications (${seconds(leaks.freedMs)}), ` +
      `${leaks.atEnd} after the leases (${seconds(leaks.allFreedMs)})`,
    `leaks      ${leaks.leaked} blocks; ${leaks.heldAlthoughTold} not freed after their notification; ${leaks.expiredRequests} requests expired`,
    // Leases of earlier requests may have ended during the load.
    ...(leaks.before === 0
      ? []
      : [
          `           a leak of up to ${leaks.before} blocks is not seen: run the load again when no block is in use`,
        ]),
  ];
}
