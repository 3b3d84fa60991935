import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { silentLog } from "@kv/interface";
import { startCluster } from "../apps/demo/src/cluster/cluster.js";
import { complete } from "../apps/demo/src/run/completion-client.js";
import type { Row } from "./report.js";
import { bestRatio, median, spread } from "./report.js";

/** Windows of each cluster. */
const ROUNDS = Number(process.env.KV_BENCH_ROUNDS ?? 60);
/** A window has several collections of garbage, so that each side pays for its own. */
const WINDOW_REQUESTS = 160;
const WARM_UP_REQUESTS = 400;
const CLIENTS = 8;
const PROMPT_TOKENS = 64;
const OUTPUT_TOKENS = 8;
const WANTED = 0.98;

/**
 * What traces cost: three clusters of the demo in this process, one of which writes a span for everything to a file. They get the same load in turn;
 * the tiny model is computed for real. The ratio of the two without traces shows how exact the measurement is.
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
  const clusters = [await start(), await start(join(folder, "spans.jsonl")), await start()] as const;
  try {
    const urls = clusters.map(({ proxy }) => proxy.url);
    for (const url of urls) await perSecond(url, WARM_UP_REQUESTS);
    const rates: number[][] = urls.map(() => []);
    for (let round = 0; round < ROUNDS; round += 1) {
      const order = round % 2 === 0 ? [0, 1, 2] : [2, 1, 0];
      for (const at of order) rates[at]?.push(await perSecond(urls[at] ?? "", WINDOW_REQUESTS));
    }
    const [plain = [], traced = [], control = []] = rates;
    const row = (what: string, ours: readonly number[], wanted?: number): Row => {
      const ratios = ours.map((value, round) => value / (plain[round] ?? Number.NaN));
      const ratio = median(ratios);
      return {
        what: `${what} (ratio ± ${uncertaintyOfMedian(ratios).toFixed(4)})`,
        ours: spread(ours, "/s"),
        theirs: spread(plain, "/s"),
        ratio,
        best: bestRatio(ours, plain, "most"),
        wanted: wanted === undefined ? "reported" : `>= ${wanted}`,
        met: wanted === undefined ? undefined : ratio >= wanted,
      };
    };
    const load = `${CLIENTS} clients, ${ROUNDS} windows of ${WINDOW_REQUESTS} requests`;
    return [
      row(
        `requests of the demo per second of processor time, ${load}: every request traced / no traces`,
        traced,
        WANTED,
      ),
      row("control: another cluster without traces / no traces", control),
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
