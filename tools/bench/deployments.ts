import { jsonLog } from "@kv/fleet/front-end";
import { startCluster } from "../../apps/demo/src/cluster/cluster.js";
import type { ClusterOptions } from "../../apps/demo/src/cluster/cluster-plan.js";
import { type Send, sendTo } from "./conversations.js";

export interface Deployment {
  readonly send: Readonly<Record<"proxy" | "P", Send>>;
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
 * The C library keeps freed memory, so that a forward pass does not wait for new pages, as on an
 * accelerator.
 */
const KEEP_FREED_MEMORY = {
  MALLOC_MMAP_THRESHOLD_: `${1 << 30}`,
  MALLOC_TRIM_THRESHOLD_: `${1 << 30}`,
};

export async function openProcesses(
  options: Omit<ClusterOptions, "transport">,
): Promise<Deployment> {
  Object.assign(process.env, KEEP_FREED_MEMORY);
  const cluster = await startCluster(
    { ...options, transport: "nixl" },
    { log: jsonLog("error", process.stderr), logLevel: "error" },
  );
  return {
    send: {
      proxy: sendTo(cluster.proxy.url, "bench"),
      P: sendTo(cluster.prefills[0]?.url ?? "", "bench-p"),
    },
    settled: (work) => work,
    close: () => cluster.close(),
  };
}
