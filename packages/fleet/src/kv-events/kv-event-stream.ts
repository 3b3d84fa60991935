import {
  type Clock,
  KvError,
  type Log,
  type LogFields,
  type Timer,
  type YieldingQueue,
} from "@kv/interface";
import { readTcpEndpoint, ZmqConnection, ZmqSubscription } from "@kv/side-channel";
import type { KvEventStatus } from "../instances/instance.js";
import type { Steps } from "./block-index.js";
import {
  type RemovedBlocks,
  readKvEventBatch,
  type StoredBlocks,
  SUBSCRIPTION_LIMITS,
} from "./kv-event-batch.js";

/** Sockets of a publisher of KV events: `tcp://host:port`. */
export interface KvEventSource {
  readonly endpoint: string;
  readonly replayEndpoint: string | undefined;
}

/** What the events of one engine are told to. */
export interface KvEventIndex {
  /** Blocks in it. */
  readonly size: number;
  /** Blocks that were left out because it is full. */
  readonly refused: number;
  /** Events that contradict earlier ones. */
  readonly contradictions: number;
  stored(blocks: StoredBlocks): Steps;
  removed(blocks: RemovedBlocks): Steps;
  /** The engine has cleared its cache, or events were lost. */
  cleared(): Steps;
}

/** A publisher could cause any number of warnings. */
const WARNING_INTERVAL_MS = 600_000;
/** Further batches are dropped and fetched again. */
const MAX_HELD = 1024;
const MAX_HELD_BYTES = 32 * 1024 * 1024;
/** libzmq drops what a publisher sends too fast. */
const MAX_ROUNDS = 100;
const MIN_REPLAY_INTERVAL_MS = 1000;

/** vLLM's publisher looks for requests at least every 100 ms. */
const IDLE_TIMEOUT_MS = 5000;
/** Excludes the time to apply batches. */
const REPLAY_TIMEOUT_MS = 60_000;
const END = 2n ** 64n - 1n;

interface Batch {
  readonly sequence: bigint;
  readonly payload: Uint8Array;
}

/**
 * Tells an index the KV events of one engine. The replay socket provides earlier
 * and lost batches. Batches share the process's time and wait at the publisher.
 */
export class KvEventStream<Index extends KvEventIndex> {
  readonly index: Index;
  readonly #source: KvEventSource;
  readonly #log: Log;
  readonly #clock: Clock;
  readonly #turns: YieldingQueue;
  readonly #socket: ZmqSubscription;
  readonly #closing = new AbortController();
  #isConnected = false;
  #isReplaying = false;
  #next = 0n;
  /** A restarted publisher has another last batch, as batches contain the time. */
  #last: Batch | undefined;
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

  constructor(
    source: KvEventSource,
    index: Index,
    {
      log,
      clock,
      turns,
    }: { readonly log: Log; readonly clock: Clock; readonly turns: YieldingQueue },
    onLost: () => void = () => {},
  ) {
    this.index = index;
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

  /** Clears the index if missed batches cannot be fetched. */
  #catchUp(): void {
    if (this.#isReplaying) return;
    this.#isReplaying = true;
    const waitMs = this.#replayedAtMs + MIN_REPLAY_INTERVAL_MS - this.#clock.now();
    this.#timer?.cancel();
    if (waitMs > 0) this.#timer = this.#clock.setTimer(() => void this.#replay(), waitMs);
    else void this.#replay();
  }

  async #replay(): Promise<void> {
    // The lost connection may have left a batch.
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

  async #replayRound(endpoint: string): Promise<boolean> {
    const known = this.#last;
    let isFirst = true;
    let isOther = false;
    let hasHole = false;
    const nextBefore = this.#next;
    await this.#replayFrom(endpoint, known?.sequence ?? 0n, (batch) => {
      const { sequence, payload } = batch;
      if (isFirst && known !== undefined && sequence === known.sequence && !isOther) {
        isFirst = false;
        isOther = Buffer.compare(payload, known.payload) !== 0;
        return undefined;
      }
      if (isOther || hasHole) return undefined;
      if (sequence > this.#next) {
        // A hole before the first batch is lost history. libzmq dropped any later hole.
        if (!isFirst) {
          hasHole = true;
          return undefined;
        }
        this.#startAt(sequence, "the publisher no longer has the first batches");
      }
      isFirst = false;
      return sequence === this.#next ? this.#apply(batch) : undefined;
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

  /**
   * Asks the publisher for the batches it still has (vLLM 0.32 and 0.33,
   * `ZmqEventPublisher._service_replay`: a ROUTER that answers with one message per batch, the
   * sequence number -1 last).
   * `take` gets them in order of sequence, with gaps; its promise delays the next.
   *
   * @throws `KV_SIDE_CHANNEL_UNREACHABLE`, `KV_SIDE_CHANNEL_TIMEOUT`, `KV_WIRE_MALFORMED` for
   * sequence numbers that do not grow; the signal's reason.
   */
  async #replayFrom(
    endpoint: string,
    from: bigint,
    take: (batch: Batch) => Promise<void> | undefined,
  ): Promise<void> {
    const clock = this.#clock;
    const { signal } = this.#closing;
    signal.throwIfAborted();
    const { host, port } = readTcpEndpoint(endpoint) ?? { host: "", port: 0 };
    const { maxFrames, maxMessageBytes } = SUBSCRIPTION_LIMITS;
    const startedAtMs = clock.now();
    let appliedMs = 0;
    let last = from - 1n;
    await new Promise<void>((resolve, reject) => {
      const timeout = () => {
        const message = `the replay socket ${endpoint} did not answer in time; the connection is ${connection.stage}`;
        end(new KvError("KV_SIDE_CHANNEL_TIMEOUT", message));
      };
      let timer = clock.setTimer(timeout, IDLE_TIMEOUT_MS);
      const end = (error?: unknown) => {
        timer.cancel();
        signal.removeEventListener("abort", aborted);
        connection.close();
        if (error === undefined) resolve();
        else reject(error);
      };
      const aborted = () => end(signal.reason);
      const connection = new ZmqConnection({
        host,
        port,
        socketType: "REQ",
        peerTypes: ["ROUTER", "REP"],
        maxFrames,
        maxMessageBytes,
      });
      connection.keepAlive(false);
      connection.onEstablished = () => connection.send([new Uint8Array(0), encodeSequence(from)]);
      connection.onMessage = (frames) => {
        // Frames: delimiter, topic (in later versions), sequence number, payload.
        const [number, payload] = frames.slice(-2);
        const sequence = readSequence(number);
        if (sequence === undefined || payload === undefined || frames[0]?.byteLength !== 0)
          throw new KvError("KV_WIRE_MALFORMED", "a replayed message is not a batch");
        if (sequence === END) {
          end();
          return undefined;
        }
        if (sequence <= last)
          throw new KvError(
            "KV_WIRE_MALFORMED",
            `batch ${sequence} was replayed after batch ${last}`,
          );
        last = sequence;
        const beganAtMs = clock.now();
        if (beganAtMs - startedAtMs - appliedMs > REPLAY_TIMEOUT_MS) {
          timeout();
          return undefined;
        }
        timer.cancel();
        return Promise.resolve(take({ sequence, payload })).then(() => {
          appliedMs += clock.now() - beganAtMs;
          if (!connection.lost) timer = clock.setTimer(timeout, IDLE_TIMEOUT_MS);
        });
      };
      connection.onLost = ({ why, cause }) => {
        const message = `the replay socket ${endpoint} cannot be reached: ${why}`;
        end(KvError.is(cause) ? cause : new KvError("KV_SIDE_CHANNEL_UNREACHABLE", message));
      };
      signal.addEventListener("abort", aborted, { once: true });
    });
  }

  #startAtHeld(why: string): void {
    const { sequence = this.#next } = this.#held[0] ?? {};
    if (sequence !== this.#next) this.#startAt(sequence, why);
  }

  #startAt(sequence: bigint, why: string | null): void {
    if (this.#hasStarted && sequence > 0n)
      this.#log.info("kv-events-missed", {
        endpoint: this.#source.endpoint,
        expected: String(this.#next),
        at: String(sequence),
      });
    // Missed batches may have evicted blocks of the index.
    void this.#turns.run(this.index.cleared());
    this.#missed = sequence;
    this.#next = sequence;
    this.#last = undefined;
    this.#reason = sequence === 0n ? null : why;
  }

  async #applyHeld(): Promise<boolean> {
    const isWhole = !this.#droppedHeld;
    this.#droppedHeld = false;
    for (let batch = this.#held[0]; batch !== undefined; batch = this.#held[0]) {
      if (batch.sequence > this.#next) return false;
      this.#held.shift();
      this.#heldBytes -= batch.payload.byteLength;
      if (batch.sequence === this.#next) await this.#apply(batch);
    }
    return isWhole;
  }

  /** Never rejects. */
  #apply(batch: Batch): Promise<void> {
    this.#applied = this.#turns.run(this.#applying(batch));
    return this.#applied;
  }

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
          // Frees memory before new blocks take it.
          yield* this.index.cleared();
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

function readSequence(frame: Uint8Array | undefined): bigint | undefined {
  if (frame?.byteLength !== 8) return undefined;
  return new DataView(frame.buffer, frame.byteOffset, frame.byteLength).getBigUint64(0);
}

function encodeSequence(sequence: bigint): Uint8Array {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64BE(sequence);
  return bytes;
}
