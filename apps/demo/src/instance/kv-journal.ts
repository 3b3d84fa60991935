import type { Clock, KvTransferParams } from "@kv/interface";
import { DIGEST_TOKENS } from "../engine/cache/kv-layout.js";
import type { KvPool } from "../engine/cache/kv-pool.js";
import type { EngineHooks } from "../engine/hooks.js";
import type { InstancePlatform } from "./instance-platform.js";
import type { Measured, TransferMeter } from "./transfer-meter.js";

/** KV that this instance sent or received for one request. Part of the body of `/kv/transfers`. */
export interface KvRecord {
  readonly direction: "sent" | "received";
  /** The engine's request id: a prefix, the client's `X-Request-Id` and a suffix. */
  readonly request_id: string;
  readonly tokens: number;
  readonly cached_tokens: number;
  /** SHA-256 of each `digest_tokens` tokens; empty without digests. */
  readonly digests: readonly string[];
  readonly digest_tokens: number;
  /** From the submission to the first forward pass (sender), or to the admission (receiver). */
  readonly queue_ms: number;
  /** From the arrival of the KV to the first token; receiver only. */
  readonly first_token_ms?: number;
  readonly forward_ms?: number;
  readonly save_ms?: number;
  /** Only on the side that moved the bytes: the receiver with pull, the sender with push. */
  readonly transfer?: KvTransferRecord;
}

export interface KvTransferRecord {
  readonly remote_engine_id: string | null;
  readonly remote_request_id: string | null;
  readonly length_bytes: number;
  readonly transfers: number;
  readonly descriptors: number;
  /** From the start of the first transfer to the end of the last. */
  readonly transfer_ms: number;
  /** From the admission of the request to the report of the last rank, handshake included. */
  readonly waited_ms: number;
  readonly load_ms: number;
}

const CAPACITY = 256;

export class KvJournal {
  readonly records: KvRecord[] = [];

  add(record: KvRecord): void {
    this.records.push(record);
    if (this.records.length > CAPACITY) this.records.splice(0, this.records.length - CAPACITY);
  }

  /**
   * Adds to the latest record of a request: the transfer of a sent one, the time of the first token
   * of a received one.
   */
  update(direction: KvRecord["direction"], requestId: string, change: Partial<KvRecord>): void {
    const at = this.records.findLastIndex(
      (record) => record.direction === direction && record.request_id === requestId,
    );
    const record = this.records[at];
    if (record !== undefined) this.records[at] = { ...record, ...change };
  }
}

export interface ObserveKvOptions {
  readonly pool: KvPool;
  readonly journal: KvJournal;
  readonly meter: TransferMeter;
  readonly clock: Clock;
  readonly digests: boolean;
  /** By request id: the prompt block to zero when its KV has arrived. Removed when done. */
  readonly blocksToZero: Map<string, number>;
  readonly takeCopies: InstancePlatform["takeCopies"];
}

/**
 * Engine hooks that record sent and received KV, and zero a block for the demo's negative control.
 */
export function observeKv(options: ObserveKvOptions): EngineHooks {
  const { pool, journal, meter, clock, digests, blocksToZero, takeCopies } = options;
  const digestsOf = (blockIds: readonly number[], count: number) =>
    digests ? pool.digests({ blockIds, from: 0, count }) : Promise.resolve([]);
  /** Requests whose KV a peer may read, with the blocks of the staging pool where there is one. */
  const sendable = new Map<
    string,
    { startedMs: number; sinceMs: number; blockIds: readonly number[] | undefined }
  >();
  return {
    async beforeSend({
      requestId,
      kvTransferParams,
      blockIds,
      tokens,
      forwardMs,
      queuedMs,
      startedMs,
    }) {
      if (kvTransferParams.do_remote_decode !== true) return;
      const copies = takeCopies(requestId);
      sendable.set(requestId, { startedMs, sinceMs: clock.now(), blockIds: copies?.wireBlockIds });
      journal.add({
        direction: "sent",
        request_id: requestId,
        tokens,
        cached_tokens: 0,
        queue_ms: queuedMs,
        forward_ms: forwardMs,
        save_ms: copies?.saveMs ?? 0,
        digests: await digestsOf(blockIds, tokens),
        digest_tokens: DIGEST_TOKENS,
      });
    },
    afterFirstToken: ({ requestId, sinceMs }) =>
      journal.update("received", requestId, { first_token_ms: sinceMs }),
    afterSend({ requestId, blockIds }) {
      const nowMs = clock.now();
      const sent = sendable.get(requestId);
      const { startedMs, sinceMs } = sent ?? { startedMs: nowMs, sinceMs: nowMs };
      sendable.delete(requestId);
      // Layer-wise WRITEs begin during the forward pass.
      const measured = meter.take(sent?.blockIds ?? blockIds, startedMs);
      if (measured.transfers === 0) return;
      journal.update("sent", requestId, {
        transfer: transferRecord({}, measured, nowMs - sinceMs, 0),
      });
    },
    async afterReceive({
      requestId,
      kvTransferParams,
      blockIds,
      tokens,
      cachedBlocks,
      admittedMs,
      queuedMs,
    }) {
      const receivedAtMs = clock.now();
      const copies = takeCopies(requestId);
      // With staging, the transport moved blocks of the staging pool.
      const measured = meter.take(copies?.wireBlockIds ?? blockIds, admittedMs);
      journal.add({
        direction: "received",
        request_id: requestId,
        tokens,
        cached_tokens: cachedBlocks * pool.config.blockSize,
        queue_ms: queuedMs,
        digests: await digestsOf(blockIds, tokens),
        digest_tokens: DIGEST_TOKENS,
        transfer: transferRecord(
          kvTransferParams,
          measured,
          receivedAtMs - admittedMs,
          copies?.loadMs ?? 0,
        ),
      });
      const block = blocksToZero.get(requestId);
      blocksToZero.delete(requestId);
      if (block === undefined) return { damaged: false };
      // Blocks of the prefix cache are shared with other requests: only received blocks are
      // damaged.
      const own = blockIds.slice(cachedBlocks);
      const id = own[Math.min(block, own.length - 1)];
      if (id !== undefined) await pool.zeroBlock(id);
      return { damaged: id !== undefined };
    },
  };
}

function transferRecord(
  { remote_engine_id: engineId, remote_request_id: requestId }: KvTransferParams,
  { lengthBytes, transfers, descriptors, transferMs }: Measured,
  waitedMs: number,
  loadMs: number,
): KvTransferRecord {
  return {
    remote_engine_id: typeof engineId === "string" ? engineId : null,
    remote_request_id: typeof requestId === "string" ? requestId : null,
    length_bytes: lengthBytes,
    transfers,
    descriptors,
    transfer_ms: transferMs,
    waited_ms: waitedMs,
    load_ms: loadMs,
  };
}
