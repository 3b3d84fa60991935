import type { Clock } from "@kv/interface";
import { isWireSafeRequestId, newCapability } from "@kv/protocol";
import { OldestFirst } from "./oldest-first.js";

/** One use of a request's blocks. */
export interface Generation {
  /** The engine's id of the request. */
  readonly requestId: string;
  /**
   * The id of the request in notifications and heartbeats. The engine's own id, as in vLLM, unless
   * that id was used recently (a notification for the earlier use may still arrive), is too long,
   * or would be misparsed (see `isWireSafeRequestId`).
   */
  readonly wireId: string;
  /** Unique per scheduler; higher than that of every earlier generation. */
  readonly generation: number;
  /** Only those who are told it may act on the request, see `newCapability`. */
  readonly capability: string;
}

/** Options of `Generations`. */
export interface GenerationsOptions {
  /** Clock for the time that ended ids are remembered. */
  readonly clock: Clock;
  /**
   * How long an ended id is remembered; notifications under way arrive within it. @default 600_000
   */
  readonly rememberMs?: number | undefined;
}

/**
 * Longer ids would make a heartbeat of a few hundred requests too long for one notification. vLLM's
 * have about 60 characters.
 */
const MAX_WIRE_ID_LENGTH = 160;

/**
 * Distinguishes one use of a request's blocks from the next. A generation begins when blocks are
 * kept for a peer and ends when they go back to the engine. A reference to an ended generation is
 * stale: the blocks may hold another request's KV.
 */
export class Generations {
  readonly #clock: Clock;
  readonly #rememberMs: number;
  readonly #byRequestId = new Map<string, Generation>();
  readonly #byWireId = new Map<string, Generation>();
  /** When request ids ended. */
  readonly #endedAtMs = new OldestFirst<string, number>();
  #last = 0;

  constructor({ clock, rememberMs = 600_000 }: GenerationsOptions) {
    this.#clock = clock;
    this.#rememberMs = rememberMs;
  }

  /** Returns the request's open generation, or begins a new one. */
  begin(requestId: string): Generation {
    const current = this.#byRequestId.get(requestId);
    if (current !== undefined) return current;
    this.#forgetOld();
    let wireId: string;
    do {
      this.#last += 1;
      wireId = this.#wireIdOf(requestId);
    } while (this.#byWireId.has(wireId));
    const generation: Generation = {
      requestId,
      wireId,
      generation: this.#last,
      capability: newCapability(),
    };
    this.#byRequestId.set(requestId, generation);
    this.#byWireId.set(wireId, generation);
    return generation;
  }

  /** Ends the request's generation. Its number is never used again. */
  end(requestId: string): void {
    const current = this.#byRequestId.get(requestId);
    if (current === undefined) return;
    this.#byRequestId.delete(requestId);
    this.#byWireId.delete(current.wireId);
    this.#endedAtMs.set(requestId, this.#clock.now());
  }

  /** The request's open generation. */
  byRequestId(requestId: string): Generation | undefined {
    return this.#byRequestId.get(requestId);
  }

  /** The open generation with this wire id. */
  byWireId(wireId: string): Generation | undefined {
    return this.#byWireId.get(wireId);
  }

  /** Ends and forgets all generations. */
  clear(): void {
    this.#byRequestId.clear();
    this.#byWireId.clear();
    this.#endedAtMs.clear();
  }

  /** Number of open generations. */
  get size(): number {
    return this.#byRequestId.size;
  }

  #wireIdOf(requestId: string): string {
    const isTaken = this.#endedAtMs.has(requestId) || this.#byWireId.has(requestId);
    if (!isTaken && requestId.length <= MAX_WIRE_ID_LENGTH && isWireSafeRequestId(requestId))
      return requestId;
    const start = requestId.slice(0, MAX_WIRE_ID_LENGTH / 2).replaceAll(",", "_");
    const wireId = `${start}.g${this.#last}`;
    return isWireSafeRequestId(wireId) ? wireId : `r.${wireId}`;
  }

  #forgetOld(): void {
    const horizonMs = this.#clock.now() - this.#rememberMs;
    for (let { oldest } = this.#endedAtMs; oldest !== undefined; { oldest } = this.#endedAtMs) {
      if (oldest.value > horizonMs) break;
      this.#endedAtMs.delete(oldest.key);
    }
  }
}
