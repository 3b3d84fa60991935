import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { silentLog } from "@kv/interface";
import { startCluster } from "../apps/demo/src/cluster/cluster.js";
import { complete } from "../apps/demo/src/run/completion-client.js";
import type { Row } from "./report.js";
import { bestRatio, pairRatio, spread } from "./report.js";

const ROUNDS = Number(process.env.KV_BENCH_ROUNDS ?? 30);
const WINDOW_MS = 1500;
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
    for (const url of urls) await perSecond(url);
    const rates: [number[], number[]] = [[], []];
    for (let round = 0; round < ROUNDS; round += 1) {
      const order = round % 2 === 0 ? ([0, 1] as const) : ([1, 0] as const);
      for (const at of order) rates[at].push(await perSecond(urls[at]));
    }
    const ratio = pairRatio(rates[0], rates[1]);
    return [
      {
        what: `requests of the demo per second of processor time, ${CLIENTS} clients: every request traced / no traces`,
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

let sent = 0;

/**
 * Requests per second of this process's processor time, which is what a busy process is limited by and what other load on the machine changes
 * least. Each prompt is new, so that its KV is transferred.
 */
async function perSecond(url: string): Promise<number> {
  const begun = performance.now();
  const before = process.cpuUsage();
  let done = 0;
  async function client(): Promise<void> {
    while (performance.now() - begun < WINDOW_MS) {
      sent += 1;
      const promptTokens = Array.from(
        { length: PROMPT_TOKENS },
        (_, at) => 10 + ((sent * 131 + at * 17) % 900),
      );
      await complete({ url, requestId: `bench-${sent}`, promptTokens, maxTokens: OUTPUT_TOKENS });
      done += 1;
    }
  }
  await Promise.all(Array.from({ length: CLIENTS }, client));
  const { user, system } = process.cpuUsage(before);
  return (done * 1e6) / (user + system);
}
