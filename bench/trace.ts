import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { silentLog } from "@kv/interface";
import { startCluster } from "../apps/demo/src/cluster/cluster.js";
import { complete } from "../apps/demo/src/run/completion-client.js";
import type { Row } from "./report.js";
import { bestRatio, median, spread } from "./report.js";

/** Pairs of windows. */
const ROUNDS = Number(process.env.KV_BENCH_ROUNDS ?? 100);
/** A window has several collections of garbage, so that each side pays for its own. */
const WINDOW_REQUESTS = 160;
const WARM_UP_REQUESTS = 600;
const CLIENTS = 8;
const PROMPT_TOKENS = 64;
const OUTPUT_TOKENS = 8;
const WANTED = 0.98;

/**
 * What traces cost: two clusters of the demo in this process, one of which writes a span for everything to a file. They get the same load in turn;
 * the tiny model is computed for real.
 */
export async function trace(): Promise<readonly Row[]> {
  const folder = mkdtempSync(join(tmpdir(), "kv-bench-trace-"));
  const start = (file?: string) =>
    startCluster(
      {
        transport: "memory",
        connector: "NixlConnector",
        prefills: 1,
        decodes: 1,
        prefillTp: 1,
        decodeTp: 1,
        prefillBlockSize: 16,
        decodeBlockSize: 16,
        cacheTokens: 16_384,
      },
      { log: silentLog, logLevel: "silent", trace: file },
    );
  const clusters = [await start(join(folder, "spans.jsonl")), await start()] as const;
  try {
    const urls = clusters.map(({ proxy }) => proxy.url) as [string, string];
    for (const url of urls) await perSecond(url, WARM_UP_REQUESTS);
    const rates: [number[], number[]] = [[], []];
    for (let round = 0; round < ROUNDS; round += 1) {
      const order = round % 2 === 0 ? ([0, 1] as const) : ([1, 0] as const);
      for (const at of order) rates[at].push(await perSecond(urls[at], WINDOW_REQUESTS));
    }
    const ratios = rates[0].map((traced, round) => traced / (rates[1][round] ?? Number.NaN));
    const ratio = median(ratios);
    const uncertain = uncertaintyOfMedian(ratios);
    return [
      {
        what:
          `requests of the demo per second of processor time, ${CLIENTS} clients, ${ROUNDS} pairs of ${WINDOW_REQUESTS} requests: ` +
          `every request traced / no traces (ratio ± ${uncertain.toFixed(4)})`,
        ours: spread(rates[0], "/s"),
        theirs: spread(rates[1], "/s"),
        ratio,
        best: bestRatio(rates[0], rates[1], "most"),
        wanted: `>= ${WANTED}`,
        met: ratio >= WANTED,
      },
    ];
  } finally {
    for (const cluster of clusters) await cluster.close();
    rmSync(folder, { recursive: true });
  }
}

/** Half of the 95 % interval of the median, from the quartiles (McGill, Tukey and Larsen, 1978). */
function uncertaintyOfMedian(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const quartile = (share: number) => sorted[Math.floor(share * (sorted.length - 1))] ?? Number.NaN;
  return (1.57 * (quartile(0.75) - quartile(0.25))) / Math.sqrt(values.length);
}

let sent = 0;

/**
 * Requests per second of this process's processor time, which is what a busy process is limited by and what other load on the machine changes
 * least. Each prompt is new, so that its KV is transferred.
 */
async function perSecond(url: string, count: number): Promise<number> {
  const before = process.cpuUsage();
  let left = count;
  async function client(): Promise<void> {
    while (left > 0) {
      left -= 1;
      sent += 1;
      const promptTokens = Array.from(
        { length: PROMPT_TOKENS },
        (_, at) => 10 + ((sent * 131 + at * 17) % 900),
      );
      await complete({ url, requestId: `bench-${sent}`, promptTokens, maxTokens: OUTPUT_TOKENS });
    }
  }
  await Promise.all(Array.from({ length: CLIENTS }, client));
  const { user, system } = process.cpuUsage(before);
  return (count * 1e6) / (user + system);
}
