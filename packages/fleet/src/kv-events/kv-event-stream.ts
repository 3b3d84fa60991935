import type { Clock, Log, LogFields, Timer, YieldingQueue } from "@kv/interface";
import { ZmqSubscription } from "@kv/side-channel";
import type { Instance, KvEventStatus } from "../instances/instance.js";
import { BlockIndex, type Steps } from "./block-index.js";
import type { BlockTree } from "./block-tree.js";
import { readKvEventBatch, SUBSCRIPTION_LIMITS } from "./kv-event-batch.js";
import { readSequence, replayBatches } from "./kv-event-replay.js";

/** Where an instance publishes its KV events. */
export interface KvEventSource {
  readonly endpoint: string;
  readonly replayEndpoint: string | undefined;
}

/** Between two warnings about one publisher, which can cause as many as it likes. */
const WARNING_INTERVAL_MS = 600_000;
/** Batches that wait while missed ones are fetched. More are dropped, and fetched too. */
const MAX_HELD = 1024;
const MAX_HELD_BYTES = 32 * 1024 * 1024;
/**
 * Requests for missed batches in a row: libzmq drops what a publisher sends faster than it leaves.
 */
const MAX_ROUNDS = 100;
/** Between two attempts to fetch missed batches. */
const MIN_REPLAY_INTERVAL_MS = 1000;

/** One batch as it came. */
interface Batch {
  readonly sequence: bigint;
  readonly payload: Uint8Array;
}

/**
 * Follows the KV events of one instance and keeps the index of its cache. Batches that were
 * published before it connected, or that were lost, are fetched from the replay socket. A publisher
 * that has been restarted is recognized by its last batch being another one. Batches are decoded
 * and applied in turns with other work of the process; what comes faster waits at the publisher.
 */
export class KvEventStream {
  readonly index: BlockIndex;
  readonly #source: KvEventSource;
  readonly #log: Log;
  readonly #clock: Clock;
  readonly #turns: YieldingQueue;
  readonly #socket: ZmqSubscription;
  readonly #closing = new AbortController();
  #isConnected = false;
  #isReplaying = false;
  #next = 0n;
  /**
   * The last batch that was applied: a restarted publisher has another one, as each contains the
   * time of its events.
   */
  #last: Batch | undefined;
  /** Resolves when no batch is being applied. */
  #applied: Promise<void> = Promise.resolve();
  #missed = 0n;
  #hasStarted = false;
  #reason: string | null = "no batch has come yet";
  readonly #held: Batch[] = [];
  #heldBytes = 0;
  #droppedHeld = false;
  #replayedAtMs = Number.NEGATIVE_INFINITY;
  #timer: Timer | undefined;
  #contradictions = 0;
  #warnedAtMs = Number.NEGATIVE_INFINITY;
  #suppressed = 0;

  /** Connects, and again whenever the connection is lost, until it is closed. */
  constructor(
    source: KvEventSource,
    { tree, instance }: { readonly tree: BlockTree; readonly instance: Instance },
    {
      log,
      clock,
      turns,
    }: { readonly log: Log; readonly clock: Clock; readonly turns: YieldingQueue },
    onLost: () => void = () => {},
  ) {
    this.index = new BlockIndex(tree, instance);
    this.#source = source;
    this.#log = log;
    this.#clock = clock;
    this.#turns = turns;
    this.#socket = new ZmqSubscription({
      endpoint: source.endpoint,
      clock,
      limits: SUBSCRIPTION_LIMITS,
      ready: () => {
        this.#isConnected = true;
        this.#catchUp();
      },
      message: (frames) => {
        const [sequence, payload] = [readSequence(frames[1]), frames[2]];
        if (sequence === undefined || payload === undefined) return undefined;
        return this.#received({ sequence, payload });
      },
      lost: (reason) => {
        this.#isConnected = false;
        this.#warn("kv-events-lost", { reason });
        onLost();
      },
    });
  }

  get hasStarted(): boolean {
    return this.#hasStarted;
  }

  status(): KvEventStatus {
    const isFull = this.index.refused > 0;
    const state = this.#isReplaying ? "replaying" : this.#isConnected ? "following" : "connecting";
    return {
      endpoint: this.#source.endpoint,
      state,
      complete: this.#hasStarted && this.#missed === 0n && !isFull && state === "following",
      missed_batches: this.#hasStarted ? Number(this.#missed) : null,
      next_batch: Number(this.#next),
      blocks: this.index.size,
      reason: isFull
        ? `the index is full, and ${this.index.refused} blocks were left out`
        : this.#reason,
    };
  }

  /** Ends the subscription. The steps that are returned give the memory of the index back. */
  close(): Steps {
    this.#closing.abort();
    this.#timer?.cancel();
    this.#socket.close();
    return this.index.cleared();
  }

  #received(batch: Batch): Promise<void> | undefined {
    if (!this.#isReplaying && batch.sequence === this.#next) return this.#apply(batch);
    if (
      this.#held.length >= MAX_HELD ||
      this.#heldBytes + batch.payload.byteLength > MAX_HELD_BYTES
    ) {
      this.#droppedHeld = true;
      return undefined;
    }
    this.#held.push(batch);
    this.#heldBytes += batch.payload.byteLength;
    if (this.#isReplaying) return undefined;
    if (this.#hasStarted && batch.sequence < this.#next)
      this.#warn("kv-events-out-of-order", {
        expected: String(this.#next),
        at: String(batch.sequence),
      });
    this.#catchUp();
    return undefined;
  }

  /** Fetches what was missed, or begins anew where that cannot be. */
  #catchUp(): void {
    if (this.#isReplaying) return;
    this.#isReplaying = true;
    const waitMs = this.#replayedAtMs + MIN_REPLAY_INTERVAL_MS - this.#clock.now();
    this.#timer?.cancel();
    if (waitMs > 0) this.#timer = this.#clock.setTimer(() => void this.#replay(), waitMs);
    else void this.#replay();
  }

  async #replay(): Promise<void> {
    // A connection that was lost may have left a batch.
    await this.#applied;
    if (this.#closing.signal.aborted) return;
    this.#replayedAtMs = this.#clock.now();
    const { replayEndpoint } = this.#source;
    if (replayEndpoint === undefined) this.#startAtHeld("the publisher has no replay socket");
    else {
      try {
        for (let round = 0; round < MAX_ROUNDS; round += 1) {
          if (!(await this.#replayRound(replayEndpoint))) break;
        }
      } catch (error) {
        if (this.#closing.signal.aborted) return;
        this.#warn("kv-events-replay-failed", { replayEndpoint, error });
        this.#startAtHeld("missed batches could not be fetched");
      }
    }
    const isWhole = await this.#applyHeld();
    this.#isReplaying = false;
    // A publisher may be faster than its replay.
    if (!isWhole && !this.#closing.signal.aborted) this.#catchUp();
  }

  /** Asks for missed batches once. Resolves with true where it has to ask again. */
  async #replayRound(endpoint: string): Promise<boolean> {
    const known = this.#last;
    const from = known?.sequence ?? 0n;
    let isFirst = true;
    let isOther = false;
    let hasHole = false;
    const nextBefore = this.#next;
    await replayBatches({
      endpoint,
      from,
      clock: this.#clock,
      signal: this.#closing.signal,
      batch: (sequence, payload) => {
        if (isFirst && known !== undefined && sequence === known.sequence && !isOther) {
          isFirst = false;
          isOther = Buffer.compare(payload, known.payload) !== 0;
          return undefined;
        }
        if (isOther || hasHole) return undefined;
        if (sequence > this.#next) {
          // Later holes are what libzmq has dropped; before the first batch is what the publisher
          // no longer has.
          if (!isFirst) {
            hasHole = true;
            return undefined;
          }
          this.#startAt(sequence, "the publisher no longer has the first batches");
        }
        isFirst = false;
        return sequence === this.#next ? this.#apply({ sequence, payload }) : undefined;
      },
    });
    if (isOther || (isFirst && known !== undefined)) {
      this.#log.info("kv-events-restarted", { endpoint: this.#source.endpoint });
      this.#startAt(0n, null);
      this.#last = undefined;
      return true;
    }
    this.#hasStarted = true;
    if (this.#missed === 0n) this.#reason = null;
    return hasHole && this.#next > nextBefore;
  }

  /** Continues at the first batch that waits, without those before it. */
  #startAtHeld(why: string): void {
    const [first] = this.#held;
    if (first === undefined || first.sequence === this.#next) return;
    this.#startAt(first.sequence, why);
  }

  #startAt(sequence: bigint, why: string | null): void {
    if (this.#hasStarted && sequence > 0n)
      this.#log.info("kv-events-missed", {
        endpoint: this.#source.endpoint,
        expected: String(this.#next),
        at: String(sequence),
      });
    // Blocks of the index may have been evicted.
    void this.#turns.run(this.index.cleared());
    this.#missed = sequence;
    this.#next = sequence;
    this.#last = undefined;
    this.#reason = sequence === 0n ? null : why;
  }

  /** Applies the batches that have waited. False where one of them is missing. */
  async #applyHeld(): Promise<boolean> {
    const dropped = this.#droppedHeld;
    this.#droppedHeld = false;
    for (let batch = this.#held[0]; batch !== undefined; batch = this.#held[0]) {
      if (batch.sequence > this.#next) return false;
      this.#held.shift();
      this.#heldBytes -= batch.payload.byteLength;
      if (batch.sequence === this.#next) await this.#apply(batch);
    }
    return !dropped;
  }

  /** Applies a batch in turns with others. Never rejects. */
  #apply(batch: Batch): Promise<void> {
    this.#applied = this.#turns.run(this.#applying(batch));
    return this.#applied;
  }

  /** The index of a stream that was closed stays empty. */
  *#untilClosed(steps: Steps): Steps {
    while (!this.#closing.signal.aborted && steps.next().done !== true) yield;
  }

  *#applying(batch: Batch): Steps {
    try {
      for (const event of readKvEventBatch(batch.payload)) {
        yield;
        if (this.#closing.signal.aborted) return;
        if (event === undefined) continue;
        if (event.type === "stored") yield* this.#untilClosed(this.index.stored(event));
        else if (event.type === "removed") yield* this.index.removed(event);
        else {
          // Before blocks come again: memory is given back as fast as it is taken.
          yield* this.index.cleared();
          // What was missed concerned blocks that are gone.
          this.#missed = 0n;
          this.#reason = null;
        }
      }
    } catch (error) {
      this.#missed += 1n;
      this.#reason = "a batch could not be read";
      this.#warn("kv-events-malformed", { error });
    }
    this.#hasStarted = true;
    if (this.#missed === 0n) this.#reason = null;
    this.#next = batch.sequence + 1n;
    this.#last = batch;
    const { contradictions } = this.index;
    if (contradictions > this.#contradictions)
      this.#warn("kv-events-contradictory", { contradictions });
    this.#contradictions = contradictions;
  }

  #warn(event: string, fields: LogFields): void {
    if (this.#clock.now() - this.#warnedAtMs < WARNING_INTERVAL_MS) {
      this.#suppressed += 1;
      return;
    }
    const { endpoint } = this.#source;
    this.#log.warn(event, { endpoint, ...fields, suppressed: this.#suppressed });
    this.#warnedAtMs = this.#clock.now();
    this.#suppressed = 0;
  }
}
