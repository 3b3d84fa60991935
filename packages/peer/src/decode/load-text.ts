import type { LoadReport } from "./load-report.js";

/** The report as a table, and the verdict at the end. */
export function loadText({ server, requests, leaks, verdict, reasons, ...report }: LoadReport): string {
  const { prefill, pull, elapsedMs, lengthBytes } = report;
  const version = server.vllmVersion === undefined ? "" : `, vLLM ${server.vllmVersion}`;
  const seconds = elapsedMs / 1000;
  const lines = [
    `${server.url}: engine ${server.engineId}, TP ${server.tpSize}${version}`,
    "",
    `requests   ${requests.sent} in ${seconds.toFixed(1)} s (${report.requestsPerSecond.toFixed(2)}/s): ${requests.ok} ok, ` +
      `${requests.aborted} aborted, ${requests.unnotified} not told, ${requests.failed} failed`,
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
  if (leaks === undefined) return ["leaks      not known: the server's /metrics did not tell of its blocks"];
  const seconds = (ms: number | undefined) =>
    ms === undefined ? "never" : `after ${(ms / 1000).toFixed(1)} s`;
  return [
    `blocks     ${leaks.before} in use before, ${leaks.afterTold} when all that was told had to be free (${seconds(leaks.freedMs)}), ` +
      `${leaks.atEnd} at the end (${seconds(leaks.allFreedMs)})`,
    `leaks      ${leaks.leaked} blocks; ${leaks.heldAlthoughTold} held although told; ${leaks.expiredRequests} requests expired`,
  ];
}
