import { performance } from "node:perf_hooks";
import { addonPath, loadAddon } from "../addon/load-addon.js";
import type { NativeAddon } from "../addon/native.js";
import { startTarget } from "../bench/initiator.js";
import { measure } from "../bench/measure.js";
import { nixlTransport } from "../transport.js";

// Tasks of child processes, because they may crash or hang. They use the library of
// KV_NIXL_LIBRARY.

const PAIR_BYTES = 64 << 20;
const PAIR_BLOCK_BYTES = 64 << 10;
const PAIR_ROUNDS = 5;
const TRANSFER_TIMEOUT_MS = 20_000;

export interface RuntimeAnswer {
  readonly addon: string | undefined;
  /** Variables that the addon sets for NIXL by default. */
  readonly defaults: readonly [name: string, value: string][];
}

export async function runtimeProbe(): Promise<RuntimeAnswer> {
  const addon = loadAddon();
  return { addon: addonPath(), defaults: addon.prepareEnvironment([]) ?? [] };
}

export interface BackendAnswer {
  readonly startMs: number;
  /** Null for storage, which reaches no other agent. */
  readonly metadataBytes: number | null;
  readonly memoryTypes: readonly string[];
  readonly repairs: ReturnType<NativeAddon["repairs"]>;
}

/** Without `backends` the environment selects one. */
export async function backendProbe(backends: readonly string[]): Promise<BackendAnswer> {
  const transport = nixlTransport({ backends });
  const begun = performance.now();
  const agent = await transport.createAgent();
  const startMs = performance.now() - begun;
  const memory = transport.allocate(1 << 20);
  await agent.register(memory);
  const { notifications, memoryTypes } = transport.capabilities;
  const metadataBytes = notifications ? (await agent.localMetadata()).byteLength : null;
  await transport.close();
  memory.close();
  return { startMs, metadataBytes, memoryTypes, repairs: loadAddon().repairs() };
}

/** Medians of 5 transfers of 64 MiB. */
export interface PairAnswer {
  readonly operation: "READ" | "WRITE";
  /** In units of 10^9 bytes. */
  readonly gigabytesPerSecond: number;
  /** Inside the post calls. */
  readonly postMs: number;
  /** From the first post to the last byte. */
  readonly transferMs: number;
  readonly consistent: boolean;
}

/** Moves 64 MiB each way to and from a second process. UCX prints its protocols on stderr. */
export async function pairProbe([backend = ""]: readonly string[]): Promise<PairAnswer[]> {
  // The other side's protocols would be mistaken for this side's.
  const { UCX_PROTO_INFO: _, UCX_LOG_LEVEL: __, ...quiet } = process.env;
  const target = await startTarget(PAIR_BYTES, quiet);
  try {
    const { rows } = await measure(target, {
      operations: ["READ", "WRITE"],
      sizesBytes: [PAIR_BYTES],
      blocksBytes: [PAIR_BLOCK_BYTES],
      orders: ["scattered"],
      rounds: PAIR_ROUNDS,
      check: true,
      timeoutMs: TRANSFER_TIMEOUT_MS,
      backend,
    });
    return rows.map(({ operation, gigabytesPerSecond, postMs, transferMs, consistent }) => ({
      operation,
      gigabytesPerSecond: gigabytesPerSecond.median,
      postMs: postMs.median,
      transferMs: transferMs.median,
      consistent: consistent === true,
    }));
  } finally {
    await target.close();
  }
}
