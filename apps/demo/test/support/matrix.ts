import { randomUUID } from "node:crypto";
import { jsonLog } from "@kv/fleet/front-end";
import { silentLog } from "@kv/interface";
import { isLongRun } from "@kv/testing/long-run";
import { expect } from "vitest";
import { type Cluster, startCluster } from "../../src/cluster/cluster.js";
import type { ClusterOptions } from "../../src/cluster/cluster-plan.js";
import { type CheckedRequest, checkRun } from "../../src/run/check-run.js";
import { complete } from "../../src/run/completion-client.js";
import { type PreparedRun, prepareRun } from "../../src/run/prepare-run.js";

/** TP sizes and block sizes of the tested pairs. */
export const PAIRS = [
  { prefillTp: 1, decodeTp: 1, prefillBlockSize: 16, decodeBlockSize: 16 },
  { prefillTp: 2, decodeTp: 1, prefillBlockSize: 16, decodeBlockSize: 16 },
  { prefillTp: 1, decodeTp: 2, prefillBlockSize: 16, decodeBlockSize: 16 },
  { prefillTp: 4, decodeTp: 2, prefillBlockSize: 16, decodeBlockSize: 16 },
  { prefillTp: 1, decodeTp: 1, prefillBlockSize: 16, decodeBlockSize: 32 },
  { prefillTp: 1, decodeTp: 2, prefillBlockSize: 16, decodeBlockSize: 32 },
  { prefillTp: 1, decodeTp: 1, prefillBlockSize: 32, decodeBlockSize: 16 },
  { prefillTp: 2, decodeTp: 1, prefillBlockSize: 16, decodeBlockSize: 24 },
  { prefillTp: 1, decodeTp: 2, prefillBlockSize: 24, decodeBlockSize: 16 },
] as const;

/** Push uses the same plans as pull, so one pair is tested, and all of them in the long run. */
export const PUSH_PAIRS = isLongRun ? PAIRS : [PAIRS[5]];

/** Requests of a run, and tokens of each. */
interface RunSize {
  readonly requests: number;
  readonly maxTokens: number;
}
const SIZE: RunSize = { requests: isLongRun ? 16 : 4, maxTokens: 16 };
/** Each pair of the matrix has a run. */
const SIZE_OF_PAIR: RunSize = isLongRun ? SIZE : { requests: 3, maxTokens: 8 };

/** One prefill and one decode instance over the memory transport. */
export const PAIR: ClusterOptions = {
  transport: "memory",
  connector: "NixlConnector",
  prefills: 1,
  decodes: 1,
  prefillTp: 1,
  decodeTp: 1,
  prefillBlockSize: 16,
  decodeBlockSize: 16,
  cacheTokens: 8192,
};

/** A pair with a proxy that logs nothing. */
export const startPair = (
  options: Partial<ClusterOptions> = {},
  runtime: Partial<Parameters<typeof startCluster>[1]> = {},
): Promise<Cluster> =>
  startCluster({ ...PAIR, ...options }, { log: silentLog, logLevel: "silent", ...runtime });

const prepared = new Map<string, Promise<PreparedRun>>();

/** Prompts and their reference tokens, computed once for all tests of a file, and the first one. */
export async function preparedRun(tinyKvHeads = 4, size = SIZE) {
  const key = JSON.stringify([tinyKvHeads, size]);
  const known = prepared.get(key) ?? prepareRun({ ...size, tinyKvHeads }, () => {});
  prepared.set(key, known);
  const run = await known;
  return { ...run, prompt: run.prompts[0] ?? [], answer: run.expected[0] ?? [] };
}

/** Sends all prompts at once through a pair and expects the reference tokens and equal KV. */
export async function expectEqual(
  options: Partial<ClusterOptions>,
): Promise<readonly CheckedRequest[]> {
  const run = await preparedRun(options.tinyKvHeads, SIZE_OF_PAIR);
  const log = jsonLog("error", process.stderr);
  await using cluster = await startCluster({ ...PAIR, ...options }, { log, logLevel: "error" });
  // The proxy learns each prefill instance's coordinates from its first answer; then it sends both
  // requests of push at once.
  const first = { url: cluster.proxy.url, promptTokens: [7, 8, 9], maxTokens: 1 };
  for (const [i] of cluster.prefills.entries())
    await complete({ ...first, requestId: `first-${i}` });
  const { requests, control, ok } = await checkRun(cluster, {
    ...run,
    runId: randomUUID().slice(0, 8),
    log,
  });
  expect(requests.map(({ problem }) => problem)).toEqual(run.prompts.map(() => undefined));
  expect(requests.every(({ transfer_bytes }) => transfer_bytes > 0)).toBe(true);
  expect(control).toEqual({ changed: true, restored: true });
  expect(ok).toBe(true);
  await expectAllIdle(cluster);
  return requests;
}

export const expectAllIdle = ({ prefills, decodes }: Pick<Cluster, "prefills" | "decodes">) =>
  expectIdle(...prefills, ...decodes);

/** Waits until instances hold nothing but their listeners. */
export async function expectIdle(...members: readonly { readonly url: string }[]): Promise<void> {
  for (const { url } of members) {
    const held = async () => {
      const status = (await (await fetch(`${url}/status`)).json()) as {
        outstanding: Record<string, number>;
      };
      return Object.entries(status.outstanding).filter(
        ([what, count]) => what !== "listeners" && count !== 0,
      );
    };
    await expect.poll(held, { timeout: 40_000 }).toEqual([]);
  }
}
