import {
  type BlockIds,
  type Clock,
  type ConnectorRequest,
  KvError,
  type KvErrorCode,
  type KvTransferParams,
  type Random,
} from "@kv/interface";
import { parseTransferParams, type RemotePrefillParams } from "@kv/protocol";
import { decodeIdOf } from "../connector-for.js";
import type { EngineServer, Prompt } from "../server/server.js";
import type { BlockPool } from "./block-pool.js";
import { type HeadlessDecode, UNTOUCHED } from "./headless-decode.js";

/** A fault that is made on purpose: a decode worker that gives up while it reads, or dies before it says that it has read. */
export type Fault = "abort" | "no-notify";

export interface Pulled {
  readonly outcome: "ok" | "aborted" | "failed";
  readonly fault: Fault | undefined;
  readonly code: KvErrorCode | undefined;
  readonly message: string | undefined;
  /** Since the begin of the run. */
  readonly startMs: number;
  /** From the prompt to `kv_transfer_params`. */
  readonly prefillMs: number;
  /** From there to the KV in place; undefined where it never was. */
  readonly pullMs: number | undefined;
  readonly promptTokens: number;
  readonly lengthBytes: number;
  /** Logical blocks that the server keeps until it is told, or for a lease. */
  readonly serverBlocks: number;
}

export interface PullOneOptions {
  readonly server: EngineServer;
  readonly decode: HeadlessDecode;
  readonly pool: BlockPool;
  readonly clock: Clock;
  readonly beganMs: number;
  /** Bytes of a logical block over all regions of all ranks. */
  readonly blockLengthBytes: number;
  readonly logicalBlockKernels: number;
  readonly regions: number;
  /** Keeps back the notification of this request: its id at the server. */
  keepSilent(remoteRequestId: string): void;
  readonly random: Random;
  readonly signal?: AbortSignal;
}

export interface PullOrder {
  readonly requestId: string;
  readonly prompt: Prompt;
  readonly promptTokens: number;
  readonly fault: Fault | undefined;
  /** For an abort: how long after the read was asked for. */
  readonly abortAfterMs: number;
}

/** Bytes at the begin and the end of each block by which it is seen that something was written. */
const MARK_BYTES = 64;

/** One prompt's way: computed by the server, read, looked at, dropped. Never throws. */
export async function pullOne(order: PullOrder, options: PullOneOptions): Promise<Pulled> {
  const { server, clock, beganMs } = options;
  const startMs = clock.now();
  let prefillMs = 0;
  let serverBlocks = 0;
  const about = { fault: order.fault, startMs: startMs - beganMs, promptTokens: order.promptTokens };
  try {
    const params = await server.prefill(order.prompt, {
      requestId: order.requestId,
      ...(options.signal === undefined ? {} : { signal: options.signal }),
    });
    prefillMs = clock.now() - startMs;
    const told = readTold(params);
    serverBlocks = blocksOf(told);
    const done = { ...about, code: undefined, message: undefined, prefillMs, serverBlocks };
    if (order.fault === "no-notify") {
      // Who is to be written into and says nothing never was there.
      if (told.transferMode === "push") return { ...done, outcome: "ok", pullMs: undefined, lengthBytes: 0 };
      options.keepSilent(told.remoteRequestId);
    }
    const readMs = clock.now();
    const aborted = await receiveOne(order, params, told, options);
    return {
      ...done,
      outcome: aborted ? "aborted" : "ok",
      pullMs: aborted ? undefined : clock.now() - readMs,
      lengthBytes: aborted ? 0 : serverBlocks * options.blockLengthBytes,
    };
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_INTERNAL", "a request failed");
    const { code, message } = error;
    return {
      ...about,
      outcome: "failed",
      code,
      message,
      prefillMs,
      pullMs: undefined,
      lengthBytes: 0,
      serverBlocks,
    };
  }
}

export function readTold(params: KvTransferParams): RemotePrefillParams {
  const told = parseTransferParams(params);
  if (told.kind === "remote-prefill") return told;
  throw new KvError("KV_REQUEST_INVALID", "the server's kv_transfer_params name no remote prefill");
}

export function blocksOf({ remoteBlockIds }: RemotePrefillParams): number {
  return remoteBlockIds.reduce((sum, ids) => sum + ids.length, 0);
}

/** One prompt's KV into blocks of ours, looked at, and dropped; whether it was given up. Errors: those of the transfer. */
export async function receiveOne(
  order: Pick<PullOrder, "promptTokens" | "fault" | "abortAfterMs">,
  params: KvTransferParams,
  told: RemotePrefillParams,
  options: PullOneOptions,
): Promise<boolean> {
  const { decode, pool, clock } = options;
  const request: ConnectorRequest = {
    requestId: decodeIdOf(told, options.random),
    numPromptTokens: told.remoteNumTokens ?? order.promptTokens,
    kvTransferParams: params,
  };
  const taken = await pool.take(blocksOf(told));
  const blockIds = dealt(taken, told.remoteBlockIds);
  const abort = new AbortController();
  const timer =
    order.fault === "abort"
      ? clock.setTimer(() => abort.abort(), order.abortAfterMs, { ref: true })
      : undefined;
  try {
    for (const bytes of edges(taken, options)) bytes.fill(UNTOUCHED);
    const { failure, aborted } = await decode.receive(request, blockIds, { signal: abort.signal });
    if (failure !== undefined) {
      if (!aborted) decode.finish(request, blockIds);
      if (failure.code !== "KV_REQUEST_ABORTED") throw new KvError(failure.code, failure.message);
    }
    if (aborted) return true;
    decode.finish(request, blockIds);
    checkLanded(taken, options);
    return false;
  } finally {
    timer?.cancel();
    pool.give(taken);
  }
}

function dealt(ids: readonly number[], like: BlockIds): BlockIds {
  let from = 0;
  return like.map(({ length }) => {
    from += length;
    return ids.slice(from - length, from);
  });
}

/** Both ends of each block in every region. */
function* edges(
  ids: readonly number[],
  { decode, regions, logicalBlockKernels }: PullOneOptions,
): Generator<Uint8Array> {
  for (let tpRank = 0; tpRank < decode.tpSize; tpRank++) {
    for (let region = 0; region < regions; region++) {
      for (const id of ids) {
        for (let kernel = 0; kernel < logicalBlockKernels; kernel++) {
          const block = decode.block(tpRank, region, id * logicalBlockKernels + kernel);
          yield block.subarray(0, MARK_BYTES);
          yield block.subarray(-MARK_BYTES);
        }
      }
    }
  }
}

/** The read said that it is done: then no block looks as it did before. */
function checkLanded(ids: readonly number[], options: PullOneOptions): void {
  let untouched = 0;
  for (const bytes of edges(ids, options)) if (bytes.every((byte) => byte === UNTOUCHED)) untouched += 1;
  if (untouched === 0) return;
  throw new KvError(
    "KV_TRANSFER_FAILED",
    `${untouched} ends of blocks are as they were before the read that is said to be done`,
    {
      hint: "the server reports transfers that it did not make: compare NIXL versions, run kv-peer doctor",
    },
  );
}
