import { performance } from "node:perf_hooks";
import { addonPath, loadAddon } from "../addon/load-addon.js";
import { startTarget } from "../bench/initiator.js";
import { measure } from "../bench/measure.js";
import { nixlTransport } from "../transport.js";

// What may crash or hang, each as a task of a child process. The library is the one that KV_NIXL_LIBRARY names.

const PAIR_BYTES = 64 << 20;
const PAIR_BLOCK_BYTES = 64 << 10;
const PAIR_ROUNDS = 5;
const TRANSFER_TIMEOUT_MS = 20_000;

export interface RuntimeAnswer {
  readonly addon: string | undefined;
  /** Variables that are set for NIXL where they are not set already. */
  readonly defaults: readonly [name: string, value: string][];
}

export async function runtimeProbe(): Promise<RuntimeAnswer> {
  const addon = loadAddon();
  return { addon: addonPath(), defaults: addon.prepareEnvironment([]) };
}

export interface BackendAnswer {
  readonly startMs: number;
  /** Null where the backend reaches no other agent, as storage does not. */
  readonly metadataBytes: number | null;
  readonly memoryTypes: readonly string[];
}

/** An agent with one backend, and a registration: the backend that is named, else the environment's choice. */
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
  return { startMs, metadataBytes, memoryTypes };
}

export interface PairAnswer {
  readonly operation: "READ" | "WRITE";
  readonly gigabytesPerSecond: number;
  readonly postMs: number;
  readonly transferMs: number;
  readonly consistent: boolean;
}

/** A second process, 64 MiB each way in blocks of 64 KiB, compared byte for byte. UCX tells the protocols that it picks on stderr. */
export async function pairProbe([backend = ""]: readonly string[]): Promise<PairAnswer[]> {
  // Of this side only: the protocols of the other one would be taken for this one's.
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
