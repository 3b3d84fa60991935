import { type Clock, KvError, type Timer } from "@kv/interface";
import { type MessageOf, nameOf, type TierMessage } from "./messages.js";

/** vLLM's `_LOOKUP_TIMEOUT_S`: a peer that does not answer is left. */
const LOOKUP_MS = 30_000;
/** vLLM's `_LOAD_TIMEOUT_S`: a longer fetch is aborted. */
const FETCH_MS = 30_000;
/** vLLM's `_ABORT_ACK_TIMEOUT_S`. */
const ABORT_ACK_MS = 10_000;
/**
 * After a session nobody says when the peer's WRITE ends. vLLM lets a running one drain for 10 s,
 * and starts none after 30 s.
 */
const WRITES_OVER_MS = 60_000;

export interface ClientRoleOptions {
  readonly peerId: string;
  readonly clock: Clock;
  readonly send: (message: TierMessage) => void;
  /** Ends the session of a peer that does not answer. */
  readonly leave: (error: KvError) => void;
}

export interface Fetch {
  /**
   * Resolves when all blocks are written.
   * @throws `KV_TRANSFER_FAILED`, `KV_TRANSFER_TIMEOUT`, `KV_TRANSFER_ABORTED`,
   * `KV_PEER_DISCONNECTED`.
   */
  readonly done: Promise<void>;
  /** Resolves when the peer can no longer write, whatever the outcome. */
  readonly released: Promise<void>;
}

interface OpenFetch {
  readonly resolve: () => void;
  readonly reject: (error: KvError) => void;
  readonly release: () => void;
  readonly stopListening: () => void;
  timer: Timer;
  isAborted: boolean;
}

interface OpenLookup {
  readonly keys: readonly string[];
  readonly hits: Map<string, boolean>;
  readonly resolve: (hits: readonly boolean[]) => void;
  readonly reject: (error: KvError) => void;
}

interface Request {
  round: number;
  /** The peer holds blocks of a look-up for a fetch to come. */
  isOpen: boolean;
  readonly lookups: Set<OpenLookup>;
  readonly fetches: Map<number, OpenFetch>;
}

export class ClientRole {
  readonly #options: ClientRoleOptions;
  readonly #requests = new Map<string, Request>();
  #lookupTimer: Timer | undefined;
  #closed: KvError | undefined;

  constructor(options: ClientRoleOptions) {
    this.#options = options;
  }

  get isIdle(): boolean {
    return this.#requests.size === 0;
  }

  /**
   * The keys that the peer has, held for 30 s for this request's next `fetch`.
   * @throws `KV_PEER_DISCONNECTED`, `KV_TRANSFER_TIMEOUT`, `KV_TRANSFER_ABORTED`.
   */
  async lookup(
    requestId: string,
    keys: readonly Uint8Array[],
    signal: AbortSignal,
  ): Promise<readonly boolean[]> {
    const request = this.#requestOf(requestId);
    request.isOpen = true;
    let lookup: OpenLookup | undefined;
    let stopListening = () => {};
    try {
      return await new Promise((resolve, reject) => {
        lookup = { keys: keys.map(nameOf), hits: new Map(), resolve, reject };
        request.lookups.add(lookup);
        const aborted = () => reject(abortedBy(signal));
        signal.addEventListener("abort", aborted);
        stopListening = () => signal.removeEventListener("abort", aborted);
        this.#lookupTimer ??= this.#options.clock.setTimer(() => this.#lookupsTooLate(), LOOKUP_MS);
        const message = { kv_request_id: requestId, keys: [...keys], round_seq: request.round };
        this.#options.send({ type: "lookup", ...message } as MessageOf<"lookup">);
      });
    } finally {
      stopListening();
      if (lookup !== undefined) request.lookups.delete(lookup);
      this.#watchLookups();
    }
  }

  /** Has the peer write into this side's region. Closes the round. */
  fetch(
    requestId: string,
    keys: readonly Uint8Array[],
    blockIndexes: readonly number[],
    signal: AbortSignal,
  ): Fetch {
    const { clock, send } = this.#options;
    const request = this.#requestOf(requestId);
    const round = request.round++;
    request.isOpen = false;

    let release = () => {};
    const released = new Promise<void>((resolve) => {
      release = resolve;
    });
    const done = new Promise<void>((resolve, reject) => {
      const abort = (error: KvError) => this.#abort(requestId, round, error);
      const aborted = () => abort(abortedBy(signal));
      signal.addEventListener("abort", aborted);
      request.fetches.set(round, {
        resolve,
        reject,
        release,
        stopListening: () => signal.removeEventListener("abort", aborted),
        timer: clock.setTimer(() => abort(this.#tooLate(requestId, FETCH_MS)), FETCH_MS),
        isAborted: false,
      });
    });
    done.catch(() => {});
    send({
      type: "fetch",
      kv_request_id: requestId,
      keys: [...keys] as MessageOf<"fetch">["keys"],
      block_indexes: [...blockIndexes],
      round_seq: round,
    });
    return { done, released };
  }

  /** Aborts the request's fetches; the peer gives back its blocks. */
  finish(requestId: string): void {
    const request = this.#requests.get(requestId);
    if (request === undefined) return;
    const error = new KvError("KV_TRANSFER_ABORTED", `P2P tier: request ${requestId} was ended`);
    for (const round of [...request.fetches.keys()]) this.#abort(requestId, round, error);
    this.#rejectLookups(request, error);
    if (request.isOpen)
      this.#options.send({
        type: "fetch",
        kv_request_id: requestId,
        keys: [],
        block_indexes: [],
        round_seq: request.round,
      });
    request.isOpen = false;
    this.#prune(requestId, request);
  }

  onLookupResponse({ kv_request_id, keys, hits }: MessageOf<"lookup_resp">): void {
    const request = this.#requests.get(kv_request_id);
    if (request === undefined || request.lookups.size === 0) return;
    const answers = new Map(keys.map((key, at) => [nameOf(key), hits[at] === true]));
    for (const lookup of request.lookups) {
      for (const key of lookup.keys) {
        const hit = answers.get(key);
        if (hit !== undefined) lookup.hits.set(key, hit);
      }
      if (lookup.keys.some((key) => !lookup.hits.has(key))) continue;
      request.lookups.delete(lookup);
      lookup.resolve(lookup.keys.map((key) => lookup.hits.get(key) === true));
    }
    this.#watchLookups();
  }

  onTransferDone({ kv_request_id, round_seq, success }: MessageOf<"transfer_done">): void {
    this.#endFetch(
      kv_request_id,
      round_seq,
      success
        ? undefined
        : new KvError(
            "KV_TRANSFER_FAILED",
            `P2P tier: ${this.#options.peerId} could not write the blocks of ${kv_request_id}`,
            { hint: "it no longer has them, or its transport failed: its log says which" },
          ),
    );
  }

  onAbortAck({ kv_request_id, round_seq }: MessageOf<"abort_ack">): void {
    this.#endFetch(kv_request_id, round_seq, undefined);
  }

  close(error: KvError): void {
    this.#closed = error;
    this.#lookupTimer?.cancel();
    for (const request of this.#requests.values()) {
      this.#rejectLookups(request, error);
      for (const fetch of request.fetches.values()) {
        fetch.timer.cancel();
        fetch.stopListening();
        fetch.reject(error);
        this.#options.clock.setTimer(fetch.release, WRITES_OVER_MS);
      }
    }
    this.#requests.clear();
  }

  #requestOf(requestId: string): Request {
    if (this.#closed !== undefined) throw this.#closed;
    const known = this.#requests.get(requestId);
    if (known !== undefined) return known;
    const request = { round: 0, isOpen: false, lookups: new Set<OpenLookup>(), fetches: new Map() };
    this.#requests.set(requestId, request);
    return request;
  }

  /** Rejects a fetch. The peer's acknowledgement releases the blocks. */
  #abort(requestId: string, round: number, error: KvError): void {
    const { clock, send, leave } = this.#options;
    const fetch = this.#requests.get(requestId)?.fetches.get(round);
    if (fetch === undefined || fetch.isAborted) return;
    fetch.isAborted = true;
    fetch.reject(error);
    fetch.timer.cancel();
    fetch.timer = clock.setTimer(() => leave(this.#tooLate(requestId, ABORT_ACK_MS)), ABORT_ACK_MS);
    send({ type: "abort_fetch", kv_request_id: requestId, round_seq: round });
  }

  #endFetch(requestId: string, round: number, error: KvError | undefined): void {
    const request = this.#requests.get(requestId);
    const fetch = request?.fetches.get(round);
    // The abort crossed the end of the WRITE.
    if (request === undefined || fetch === undefined) return;
    request.fetches.delete(round);
    fetch.timer.cancel();
    fetch.stopListening();
    fetch.release();
    if (error === undefined) fetch.resolve();
    else fetch.reject(error);
    this.#prune(requestId, request);
  }

  #rejectLookups(request: Request, error: KvError): void {
    for (const lookup of request.lookups) lookup.reject(error);
    request.lookups.clear();
  }

  #prune(requestId: string, { isOpen, lookups, fetches }: Request): void {
    if (!isOpen && lookups.size === 0 && fetches.size === 0) this.#requests.delete(requestId);
  }

  /** Restarts the time that the peer has for a look-up. */
  #watchLookups(): void {
    this.#lookupTimer?.cancel();
    this.#lookupTimer = [...this.#requests.values()].some(({ lookups }) => lookups.size > 0)
      ? this.#options.clock.setTimer(() => this.#lookupsTooLate(), LOOKUP_MS)
      : undefined;
  }

  #lookupsTooLate(): void {
    this.#options.leave(this.#tooLate("a look-up", LOOKUP_MS));
  }

  #tooLate(what: string, ms: number): KvError {
    return new KvError(
      "KV_TRANSFER_TIMEOUT",
      `P2P tier: ${this.#options.peerId} did not answer ${what} within ${ms} ms`,
      { details: { peer: this.#options.peerId, timeoutMs: ms } },
    );
  }
}

const abortedBy = ({ reason }: AbortSignal): KvError =>
  KvError.is(reason)
    ? reason
    : new KvError("KV_TRANSFER_ABORTED", "P2P tier: the read was aborted", { cause: reason });
