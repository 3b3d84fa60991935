import { type Clock, KvError } from "@kv/interface";
import { describeEngine, type EngineAddress, engineKey } from "../handshake/engine-address.js";

/** Options of `PeerBackoff`. */
export interface PeerBackoffOptions {
  readonly clock: Clock;
  /** First delay. Default 1000 ms (vLLM 0.33). */
  readonly minMs?: number | undefined;
  /** Longest delay. Default 60,000 ms (vLLM 0.33). */
  readonly maxMs?: number | undefined;
}

/**
 * Addresses that are remembered at most: requests name addresses, so their number is not bounded by
 * the peers that exist.
 */
const MAX_FAILURES = 4096;

interface Failure {
  readonly delayMs: number;
  readonly untilMs: number;
  readonly error: KvError;
  /** The process that the request named; undefined where it named none. */
  readonly incarnation: string | undefined;
}

/**
 * Limits how often an unreachable peer is tried: after 1 s, then after twice the previous delay, up
 * to 60 s (vLLM 0.33). A request that names another process than the one that was not reached is
 * tried at once: it says that the peer was started again.
 */
export class PeerBackoff {
  readonly #clock: Clock;
  readonly #minMs: number;
  readonly #maxMs: number;
  readonly #failures = new Map<string, Failure>();

  constructor({ clock, minMs = 1000, maxMs = 60_000 }: PeerBackoffOptions) {
    this.#clock = clock;
    this.#minMs = minMs;
    this.#maxMs = maxMs;
  }

  /**
   * Errors: `KV_HANDSHAKE_BACKED_OFF`, with the last failure as its cause, while the peer's delay
   * runs.
   */
  check(address: EngineAddress, incarnation?: string): void {
    const failure = this.#failures.get(engineKey(address));
    if (failure === undefined) return;
    if (incarnation !== undefined && incarnation !== failure.incarnation) return;
    const leftMs = failure.untilMs - this.#clock.now();
    if (leftMs <= 0) return;
    const peer = describeEngine(address);
    throw new KvError(
      "KV_HANDSHAKE_BACKED_OFF",
      `${peer} is not tried again for ${Math.ceil(leftMs)} ms, after: ${failure.error.message}`,
      { cause: failure.error, details: { peer, leftMs, delayMs: failure.delayMs } },
    );
  }

  /** Starts the peer's delay, or doubles it. */
  failed(address: EngineAddress, error: KvError, incarnation?: string): void {
    const nowMs = this.#clock.now();
    // A peer that was not requested for the longest delay starts at the first delay again. This
    // limits the table without a timer.
    for (const [key, { untilMs }] of this.#failures)
      if (nowMs - untilMs > this.#maxMs) this.#failures.delete(key);
    const key = engineKey(address);
    const before = this.#failures.get(key);
    const delayMs = before === undefined ? this.#minMs : Math.min(before.delayMs * 2, this.#maxMs);
    this.#failures.delete(key);
    this.#failures.set(key, { delayMs, untilMs: nowMs + delayMs, error, incarnation });
    const [oldest] = this.#failures.keys();
    if (this.#failures.size > MAX_FAILURES && oldest !== undefined) this.#failures.delete(oldest);
  }

  /** Forgets the peer's failures. */
  succeeded(address: EngineAddress): void {
    this.#failures.delete(engineKey(address));
  }
}
