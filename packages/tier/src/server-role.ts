import { type Clock, KvError, type Log, type Timer, type Transfer } from "@kv/interface";
import { type MessageOf, nameOf, type TierMessage } from "./messages.js";

/** vLLM's `_LOOKUP_PENDING_TIMEOUT_S`: a later key is a miss. */
const LOOKUP_PENDING_MS = 5_000;
/** vLLM's `_STORE_TIMEOUT_S`: unfetched blocks are given back. */
const UNFETCHED_MS = 30_000;
const MAX_ROUNDS = 4_096;

export interface ServerRoleOptions {
  readonly store: BlockStore;
  readonly clock: Clock;
  readonly log: Log;
  /** Limit of pinned blocks per peer. Beyond it, blocks count as not found. */
  readonly maxPinnedBlocks: number;
  /** Blocks in the peer's region. */
  readonly peerBlocks: () => number;
  readonly send: (message: TierMessage) => void;
  readonly write: (
    slots: readonly number[],
    blockIndexes: readonly number[],
    signal: AbortSignal,
  ) => Transfer;
}

/** A look-up and its fetch. A request's rounds follow each other. */
interface Round {
  readonly requestId: string;
  readonly seq: number;
  /** Pinned slots by key that no WRITE reads. */
  readonly supply: Map<string, number>;
  readonly ended: AbortController;
  timer: Timer | undefined;
  lookedUp: boolean;
  fetching: boolean;
  writing: boolean;
  /** Sent when the WRITE has ended. */
  answer: "transfer_done" | "abort_ack" | "nothing";
}

/** Serves one peer: finds its blocks and WRITEs them into its region. */
export class ServerRole {
  readonly #options: ServerRoleOptions;
  readonly #rounds = new Map<string, Round>();
  readonly #writes = new Set<Promise<void>>();
  #pinned = 0;

  constructor(options: ServerRoleOptions) {
    this.#options = options;
  }

  get pinnedBlocks(): number {
    return this.#pinned;
  }

  get isIdle(): boolean {
    return this.#rounds.size === 0;
  }

  /** @throws `KV_WIRE_MALFORMED` for a fetched round. */
  async lookup(message: MessageOf<"lookup">): Promise<void> {
    const { kv_request_id, keys, round_seq } = message;
    const round = this.#roundOf(kv_request_id, round_seq);
    if (round.fetching) throw misplaced(message, "the round was fetched");
    round.lookedUp = true;

    await this.#pin(round, keys);
    if (round.ended.signal.aborted) return;

    round.timer?.cancel();
    round.timer = this.#options.clock.setTimer(() => this.#end(round, "nothing"), UNFETCHED_MS);
    const hits = keys.map((key) => round.supply.has(nameOf(key)));
    this.#options.send({ type: "lookup_resp", kv_request_id, keys, hits });
  }

  /**
   * @throws `KV_WIRE_MALFORMED` for a second fetch of a round, and for blocks outside the region.
   */
  async fetch(message: MessageOf<"fetch">): Promise<void> {
    const { kv_request_id, keys, block_indexes, round_seq } = message;
    if (keys.length === 0) {
      this.#finish(kv_request_id);
      return;
    }
    this.#checkFetch(message);
    const round = this.#roundOf(kv_request_id, round_seq);
    if (round.fetching) throw misplaced(message, "the round was fetched");
    round.fetching = true;
    round.timer?.cancel();

    if (!round.lookedUp) await this.#pin(round, keys);
    if (round.ended.signal.aborted) return;
    await this.#serve(round, keys, block_indexes);
  }

  abort({ kv_request_id, round_seq }: MessageOf<"abort_fetch">): void {
    const round = this.#rounds.get(idOf(kv_request_id, round_seq));
    if (round === undefined) this.#options.send({ type: "abort_ack", kv_request_id, round_seq });
    else this.#end(round, "abort_ack");
  }

  /** Resolves when no WRITE reads a block any more. */
  async close(): Promise<void> {
    for (const round of this.#rounds.values()) this.#end(round, "nothing");
    await Promise.all(this.#writes);
  }

  #roundOf(requestId: string, seq: number): Round {
    const id = idOf(requestId, seq);
    const known = this.#rounds.get(id);
    if (known !== undefined) return known;
    if (this.#rounds.size >= MAX_ROUNDS)
      throw new KvError(
        "KV_WIRE_LIMIT_EXCEEDED",
        `P2P tier: the peer has ${this.#rounds.size} rounds open; the limit is ${MAX_ROUNDS}`,
      );
    const round: Round = {
      requestId,
      seq,
      supply: new Map(),
      ended: new AbortController(),
      timer: undefined,
      lookedUp: false,
      fetching: false,
      writing: false,
      answer: "transfer_done",
    };
    this.#rounds.set(id, round);
    return round;
  }

  async #pin(round: Round, keys: readonly Uint8Array[]): Promise<void> {
    const { store, clock, log, maxPinnedBlocks } = this.#options;
    const wanted = new Map(keys.map((key) => [nameOf(key), key]));
    for (const name of round.supply.keys()) wanted.delete(name);
    const names = [...wanted.keys()].slice(0, maxPinnedBlocks - this.#pinned);
    if (names.length === 0) return;
    this.#pinned += names.length;

    const late = new AbortController();
    const timer = clock.setTimer(() => late.abort(), LOOKUP_PENDING_MS);
    const signal = AbortSignal.any([late.signal, round.ended.signal]);
    const pinning = store
      .pin(
        names.map((name) => wanted.get(name) as Uint8Array),
        signal,
      )
      .catch((error: unknown): [] => {
        log.warn("tier-lookup-failed", { requestId: round.requestId, error });
        return [];
      })
      .then((slots) => {
        timer.cancel();
        const found = names.map((_, at) => slots[at]);
        this.#pinned -= found.filter((slot) => slot === undefined).length;
        const spare: number[] = [];
        for (const [at, slot] of found.entries()) {
          const name = names[at] as string;
          if (slot === undefined) continue;
          // A look-up that came twice finds a block twice.
          if (signal.aborted || round.supply.has(name)) spare.push(slot);
          else round.supply.set(name, slot);
        }
        this.#unpin(spare);
      });
    await Promise.race([
      pinning,
      new Promise<void>((resolve) => {
        signal.addEventListener("abort", () => resolve());
      }),
    ]);
  }

  #unpin(slots: readonly number[]): void {
    this.#pinned -= slots.length;
    this.#options.store.unpin(slots);
  }

  #checkFetch(message: MessageOf<"fetch">): void {
    const blocks = this.#options.peerBlocks();
    const { block_indexes: indexes, keys } = message;
    const outside = indexes.find((index) => index >= blocks);
    if (outside !== undefined)
      throw misplaced(message, `block ${outside} of a region of ${blocks} blocks`);
    if (new Set(indexes).size < indexes.length || new Set(keys.map(nameOf)).size < keys.length)
      throw misplaced(message, "a key or a block is named twice");
  }

  async #serve(
    round: Round,
    keys: readonly Uint8Array[],
    indexes: readonly number[],
  ): Promise<void> {
    const { write, log } = this.#options;
    const slots = keys.flatMap((key) => round.supply.get(nameOf(key)) ?? []);
    if (slots.length < keys.length) {
      this.#end(round, "transfer_done");
      return;
    }
    for (const key of keys) round.supply.delete(nameOf(key));
    this.#unpin([...round.supply.values()]);
    round.supply.clear();
    round.writing = true;

    const writing = (async () => {
      let success = false;
      try {
        const transfer = write(slots, indexes, round.ended.signal);
        success = await transfer.done.then(
          () => true,
          (error: unknown) => {
            log.warn("tier-write-failed", { requestId: round.requestId, error });
            return false;
          },
        );
        // Until then the peer must not reuse its blocks, and the store must keep its own.
        await transfer.released;
      } catch (error) {
        log.warn("tier-write-failed", { requestId: round.requestId, error });
      }
      this.#unpin(slots);
      this.#forget(round, success);
    })();
    this.#writes.add(writing);
    await writing;
    this.#writes.delete(writing);
  }

  /** The terminal fetch. A WRITE that nobody aborted goes on. */
  #finish(requestId: string): void {
    for (const round of this.#rounds.values())
      if (round.requestId === requestId && !round.writing) this.#end(round, "nothing");
  }

  /** Ends a round. A running WRITE is aborted and ends it later. */
  #end(round: Round, answer: Round["answer"]): void {
    round.answer = answer;
    round.timer?.cancel();
    round.ended.abort();
    if (round.writing) return;
    this.#unpin([...round.supply.values()]);
    round.supply.clear();
    this.#forget(round, false);
  }

  #forget(round: Round, success: boolean): void {
    const { requestId: kv_request_id, seq: round_seq, answer } = round;
    this.#rounds.delete(idOf(kv_request_id, round_seq));
    if (answer === "transfer_done")
      this.#options.send({ type: "transfer_done", kv_request_id, success, round_seq });
    else if (answer === "abort_ack")
      this.#options.send({ type: "abort_ack", kv_request_id, round_seq });
  }
}

const idOf = (requestId: string, seq: number): string => `${seq} ${requestId}`;

function misplaced(
  { type, kv_request_id, round_seq }: MessageOf<"fetch" | "lookup">,
  what: string,
) {
  return new KvError(
    "KV_WIRE_MALFORMED",
    `P2P message: ${type} of round ${round_seq} of ${kv_request_id}: ${what}`,
  );
}

/** Keeps the served blocks. A slot is a block's number in the memory given to `openTier`. */
export interface BlockStore {
  /**
   * Returns each key's slot, pinned until `unpin`; undefined for a key not held. It may bring
   * blocks into memory first. After `signal` aborts, it pins nothing and the result is ignored.
   */
  pin(keys: readonly Uint8Array[], signal: AbortSignal): Promise<readonly (number | undefined)[]>;
  /** Takes one pin off each slot. */
  unpin(slots: readonly number[]): void;
}
