import type { StagingCopied } from "@kv/connector";
import { delegateTo } from "@kv/connector/building-blocks";
import {
  type Agent,
  type Clock,
  DESCRIPTOR_ROW,
  type DescriptorTable,
  type KvCaches,
  type PreparedList,
  type TransferRequest,
  type TransferResult,
  type Transport,
} from "@kv/interface";
import { DIGEST_TOKENS } from "../engine/cache/kv-layout.js";
import type { KvPool } from "../engine/cache/kv-pool.js";
import type { EngineHooks } from "../engine/scheduler.js";

export interface KvRecord {
  readonly direction: "sent" | "received";
  /** The engine's, which contains the client's `X-Request-Id`. */
  readonly request_id: string;
  readonly tokens: number;
  readonly cached_tokens: number;
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
  readonly transfer_ms: number;
  /** From the admission of the request to the report of the last rank, handshake included. */
  readonly waited_ms: number;
  readonly load_ms: number;
}

const MAX_RECORDS = 256;
/** Those of failed requests are never taken. */
const MAX_TRANSFERS = 4096;
const MAX_COPIED_REQUESTS = 1024;

/** For one request, of the slowest rank. */
interface Copies {
  save: number;
  load: number;
  /** Of the staging pool, transferred in place of the request's. */
  wireBlockIds: readonly number[];
}

/**
 * Records the KV that an engine sends and receives, and zeroes a block for the negative control.
 * Transfers are measured at the transport, by their local blocks, for every connector alike.
 */
export class KvJournal {
  readonly records: KvRecord[] = [];
  /** The transport, measured. */
  readonly transport: Transport;
  readonly #clock: Clock;
  readonly #caches: KvCaches[] = [];
  readonly #tables = new WeakMap<PreparedList, DescriptorTable>();
  readonly #copies = new Map<string, Copies>();
  #transfers: { block: number; startMs: number; endMs: number; result: TransferResult }[] = [];
  #firstAgent: Agent | undefined;

  constructor(transport: Transport, clock: Clock) {
    this.#clock = clock;
    this.transport = delegateTo(transport, {
      createAgent: async (options) => {
        const agent = await transport.createAgent(options);
        this.#firstAgent ??= agent;
        return this.#measured(agent);
      },
    });
  }

  get backend(): string {
    return this.#firstAgent?.backends[0] ?? "none";
  }

  /** Of a pool, or of a staging pool in its place. */
  addCaches(caches: KvCaches): void {
    this.#caches.push(caches);
  }

  copied({ requestId, direction, wire, durationMs }: StagingCopied): void {
    const copies = this.#copies.get(requestId) ?? { save: 0, load: 0, wireBlockIds: [] };
    copies[direction] = Math.max(copies[direction], durationMs);
    // A prompt that is computed in chunks is saved in several copies.
    copies.wireBlockIds = [...new Set([...copies.wireBlockIds, ...(wire[0] ?? [])])];
    this.#copies.set(requestId, copies);
    const [oldest = ""] = this.#copies.keys();
    if (this.#copies.size > MAX_COPIED_REQUESTS) this.#copies.delete(oldest);
  }

  /** Hooks of an engine with this pool. `digests`: of the KV of each request. */
  hooks(pool: KvPool, digests: boolean): EngineHooks {
    const { blockSize } = pool.config;
    const digestsOf = async (blockIds: readonly number[], count: number) =>
      digests ? pool.digests({ blockIds, from: 0, count }) : [];
    const sendable = new Map<
      string,
      { startedMs: number; sinceMs: number; wireBlockIds: readonly number[] | undefined }
    >();
    return {
      beforeSend: async (record) => {
        const { requestId, promptTokens, kvTransferParams } = record.request;
        if (kvTransferParams?.["do_remote_decode"] !== true) return;
        const { blockIds, forwardMs, submittedMs, startedMs = submittedMs } = record;
        const tokens = Math.min(record.numComputedTokens, promptTokens.length);
        const { save = 0, wireBlockIds } = this.#takeCopies(requestId);
        sendable.set(requestId, { startedMs, sinceMs: this.#clock.now(), wireBlockIds });
        this.#add({
          direction: "sent",
          request_id: requestId,
          tokens,
          cached_tokens: 0,
          queue_ms: startedMs - submittedMs,
          forward_ms: forwardMs,
          save_ms: save,
          digests: await digestsOf(blockIds, tokens),
          digest_tokens: DIGEST_TOKENS,
        });
      },
      afterFirstToken: (requestId, sinceMs) =>
        this.#update("received", requestId, { first_token_ms: sinceMs }),
      afterSend: (requestId, blockIds) => {
        const nowMs = this.#clock.now();
        const { startedMs = nowMs, sinceMs = nowMs, wireBlockIds } = sendable.get(requestId) ?? {};
        sendable.delete(requestId);
        // Layer-wise WRITEs begin during the forward pass.
        const measured = this.#takeTransfers(wireBlockIds ?? blockIds, startedMs);
        if (measured.transfers === 0) return;
        const transfer = {
          remote_engine_id: null,
          remote_request_id: null,
          ...measured,
          waited_ms: nowMs - sinceMs,
          load_ms: 0,
        };
        this.#update("sent", requestId, { transfer });
      },
      afterReceive: async (record, tokens) => {
        const { request, cachedBlocks, admittedMs, submittedMs } = record;
        const { requestId, kvTransferParams = {}, zeroBlock } = request;
        const waited_ms = this.#clock.now() - admittedMs;
        const blockIds = record.blockIds.slice(0, Math.ceil(tokens / blockSize));
        const { load = 0, wireBlockIds } = this.#takeCopies(requestId);
        this.#add({
          direction: "received",
          request_id: requestId,
          tokens,
          cached_tokens: cachedBlocks * blockSize,
          queue_ms: admittedMs - submittedMs,
          digests: await digestsOf(blockIds, tokens),
          digest_tokens: DIGEST_TOKENS,
          transfer: {
            remote_engine_id: textOf(kvTransferParams["remote_engine_id"]),
            remote_request_id: textOf(kvTransferParams["remote_request_id"]),
            ...this.#takeTransfers(wireBlockIds ?? blockIds, admittedMs),
            waited_ms,
            load_ms: load,
          },
        });
        if (zeroBlock === undefined) return { damaged: false };
        // Blocks of the prefix cache are shared with other requests.
        const received = blockIds.slice(cachedBlocks);
        const id = received[Math.min(zeroBlock, received.length - 1)];
        if (id !== undefined) await pool.zeroBlock(id);
        return { damaged: id !== undefined };
      },
    };
  }

  #add(record: KvRecord): void {
    this.records.push(record);
    if (this.records.length > MAX_RECORDS) this.records.shift();
  }

  #update(direction: KvRecord["direction"], requestId: string, change: Partial<KvRecord>): void {
    const at = this.records.findLastIndex(
      (record) => record.direction === direction && record.request_id === requestId,
    );
    const record = this.records[at];
    if (record !== undefined) this.records[at] = { ...record, ...change };
  }

  #takeCopies(requestId: string): Partial<Copies> {
    const copies = this.#copies.get(requestId);
    this.#copies.delete(requestId);
    return copies ?? {};
  }

  #measured(agent: Agent): Agent {
    return delegateTo(agent, {
      prepareLocal: async (table) => {
        // Copied before the call, because the call may take the rows over.
        const copy = { memoryType: table.memoryType, rows: table.rows.slice() };
        const list = await agent.prepareLocal(table);
        this.#tables.set(list, copy);
        return list;
      },
      transfer: (request) => {
        const startMs = this.#clock.now();
        const block = this.#blockOf(request);
        const transfer = agent.transfer(request);
        // A failed transfer is not measured; the connector handles its error.
        transfer.done.then(
          (result) => {
            if (block === undefined) return;
            // The transport's own measurement: this thread may have been busy at the end.
            const endMs = startMs + result.transferMs;
            this.#transfers.push({ block, startMs, endMs, result });
            if (this.#transfers.length > MAX_TRANSFERS) this.#transfers.shift();
          },
          () => {},
        );
        return transfer;
      },
    });
  }

  #blockOf(request: TransferRequest): number | undefined {
    const { local, runs, localIds, offsets } = request;
    const table = this.#tables.get(local);
    if (table === undefined) return undefined;
    const address = addressOf(table, ((runs ?? localIds)[0] ?? 0) + (offsets?.[0] ?? 0));
    for (const { memory, offsetBytes, numBlocks, blockStrideBytes } of this.#caches.flatMap(
      ({ regions }) => regions,
    )) {
      const within = address - memory.address - offsetBytes;
      if (within >= 0 && within < numBlocks * blockStrideBytes)
        return Math.floor(within / blockStrideBytes);
    }
    return undefined;
  }

  /** The sum of the transfers since `sinceMs` that used these blocks, which are forgotten. */
  #takeTransfers(blockIds: readonly number[], sinceMs: number) {
    const wanted = new Set(blockIds);
    const mine = this.#transfers.filter(
      ({ block, startMs }) => wanted.has(block) && startMs >= sinceMs,
    );
    this.#transfers = this.#transfers.filter(({ block }) => !wanted.has(block));
    const startMs = Math.min(...mine.map((each) => each.startMs));
    const endMs = Math.max(...mine.map((each) => each.endMs));
    return {
      length_bytes: mine.reduce((sum, { result }) => sum + result.lengthBytes, 0),
      transfers: mine.length,
      descriptors: mine.reduce((sum, { result }) => sum + result.descriptorCount, 0),
      transfer_ms: mine.length === 0 ? 0 : endMs - startMs,
    };
  }
}

const textOf = (value: unknown) => (typeof value === "string" ? value : null);

/** The address of a descriptor, by its index in the expanded order of the table's rows. */
function addressOf({ rows }: DescriptorTable, index: number): number {
  let first = 0;
  for (let at = 0; at < rows.length; at += DESCRIPTOR_ROW) {
    const [address = 0, , , strideBytes = 0, count = 0] = rows.subarray(at, at + DESCRIPTOR_ROW);
    if (index < first + count) return address + (index - first) * strideBytes;
    first += count;
  }
  return Number.NaN;
}
