import { startCluster } from "../../apps/demo/src/cluster/cluster.js";
import type { ClusterOptions } from "../../apps/demo/src/cluster/cluster-plan.js";
import { jsonLog } from "../../apps/demo/src/processes/json-log.js";
import { type CompletionOutcome, complete } from "../../apps/demo/src/run/completion-client.js";

export interface Deployment {
  /**
   * Sends a request through the proxy, or to P alone.
   * @throws The errors of the request.
   */
  send(
    prompt: readonly number[],
    maxTokens: number,
    to?: "proxy" | "P",
  ): Promise<CompletionOutcome>;
  /** Waits for work. A virtual clock stands still otherwise. */
  settled<T>(work: Promise<T>): Promise<T>;
  close(): Promise<void>;
}

export const BLOCK_TOKENS = 16;

export const ONE_PAIR = {
  connector: "NixlConnector",
  prefills: 1,
  decodes: 1,
  prefillTp: 1,
  decodeTp: 1,
  prefillBlockSize: BLOCK_TOKENS,
  decodeBlockSize: BLOCK_TOKENS,
} as const;

/** The shape of the model whose forward passes are waits. A token has 8 KiB of KV. */
export const SIMULATED = { layers: 4, kvHeads: 4, headDim: 64, maxModelLen: 4096 } as const;

/**
 * What the simulated model writes is freed after it was copied into the pool. The C library keeps
 * such memory, so that a forward pass does not wait for new pages, as on an accelerator.
 */
const KEEP_FREED_MEMORY = {
  MALLOC_MMAP_THRESHOLD_: `${1 << 30}`,
  MALLOC_TRIM_THRESHOLD_: `${1 << 30}`,
};

/** The proxy, P and D of the demo over NIXL, each in its own process. */
export async function openProcesses(
  options: Omit<ClusterOptions, "transport">,
): Promise<Deployment> {
  Object.assign(process.env, KEEP_FREED_MEMORY);
  const cluster = await startCluster(
    { ...options, transport: "nixl" },
    { log: jsonLog("error"), logLevel: "error" },
  );
  const urls = { proxy: cluster.proxy.url, P: cluster.prefills[0]?.url ?? "" };
  let sent = 0;
  return {
    send: (promptTokens, maxTokens, to = "proxy") =>
      complete({ url: urls[to], requestId: `bench-${++sent}`, promptTokens, maxTokens }),
    settled: (work) => work,
    close: () => cluster.close(),
  };
}
