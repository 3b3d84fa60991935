import type { Clock } from "@kv/interface";

/**
 * Tells one use of a request's blocks from the next. The scheduler side of a producer opens a generation when blocks are kept
 * for readers and ends it when they go back to the engine; whatever names an ended one is stale: the blocks may hold
 * another request's KV by then.
 */
export interface Generations {
  /** Opens one. Errors are the caller's: a request that has one open gets the same again. */
  begin(requestId: string): Generation;
  /** Ends it; the number never comes back. */
  end(requestId: string): void;
  byRequestId(requestId: string): Generation | undefined;
  /** The open generation that readers call `wireId`. */
  byWireId(wireId: string): Generation | undefined;
  /** Ends all, and forgets them. */
  clear(): void;
  readonly size: number;
}

export interface Generation {
  readonly requestId: string;
  /**
   * What readers call the request in notifications and heartbeats: the engine's id as it is, as vLLM does, unless that id was used
   * a while ago (a notification for the earlier use may still be on its way) or holds what the wire formats separate by.
   */
  readonly wireId: string;
  readonly generation: number;
}

export interface GenerationsOptions {
  readonly clock: Clock;
  /** How long an ended id is remembered; anything on its way must have arrived by then. */
  readonly rememberMs?: number;
}

export function createGenerations({ clock, rememberMs = 600_000 }: GenerationsOptions): Generations {
  const open = new Map<string, Generation>();
  const byWireId = new Map<string, Generation>();
  // In order of their end, so that the oldest are at the front.
  const endedAtMs = new Map<string, number>();
  let counter = 0;

  function forgetOld(): void {
    const horizonMs = clock.now() - rememberMs;
    for (const [id, atMs] of endedAtMs) {
      if (atMs > horizonMs) break;
      endedAtMs.delete(id);
    }
  }

  return {
    begin(requestId) {
      const current = open.get(requestId);
      if (current !== undefined) return current;
      forgetOld();
      let wireId: string;
      do {
        counter += 1;
        wireId = wireIdOf(requestId, endedAtMs.has(requestId) || byWireId.has(requestId), counter);
      } while (byWireId.has(wireId));
      const generation: Generation = { requestId, wireId, generation: counter };
      open.set(requestId, generation);
      byWireId.set(generation.wireId, generation);
      return generation;
    },
    end(requestId) {
      const current = open.get(requestId);
      if (current === undefined) return;
      open.delete(requestId);
      byWireId.delete(current.wireId);
      endedAtMs.delete(requestId);
      endedAtMs.set(requestId, clock.now());
    },
    byRequestId: (requestId) => open.get(requestId),
    byWireId: (wireId) => byWireId.get(wireId),
    clear() {
      open.clear();
      byWireId.clear();
      endedAtMs.clear();
    },
    get size() {
      return open.size;
    },
  };
}

/** More would make a heartbeat of a few hundred requests too long for one message; vLLM's ids have about 60. */
const MAX_WIRE_ID_LENGTH = 160;

/** Heartbeats are a list of ids with commas between them ("HB:a,b"): an id with a comma, or an empty one, would be misread. */
function wireIdOf(requestId: string, taken: boolean, counter: number): string {
  const sayable = requestId !== "" && requestId.length <= MAX_WIRE_ID_LENGTH && !requestId.includes(",");
  if (sayable && !taken) return requestId;
  return `${requestId.slice(0, MAX_WIRE_ID_LENGTH / 2).replaceAll(",", "_")}.g${counter}`;
}
