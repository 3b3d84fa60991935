import { type Clock, KvError } from "@kv/interface";

/** Keeps a peer that could not be reached from being tried at every request: 1 s, then twice as long each time, 60 s at most. */
export interface PeersBackoff {
  /** Throws `KV_HANDSHAKE_BACKED_OFF`, with the failure as its cause, while the peer's time has not come. */
  check(key: string): void;
  failed(key: string, error: KvError): void;
  succeeded(key: string): void;
  /** Peers remembered as bad. */
  readonly size: number;
}

export interface PeersBackoffOptions {
  readonly clock: Clock;
  readonly minMs?: number;
  readonly maxMs?: number;
}

interface Failure {
  readonly delayMs: number;
  readonly untilMs: number;
  readonly error: KvError;
}

export function createPeersBackoff({
  clock,
  minMs = 1000,
  maxMs = 60_000,
}: PeersBackoffOptions): PeersBackoff {
  const failures = new Map<string, Failure>();

  /** A peer that nobody asked for during the longest back-off starts anew; this bounds what is remembered without a timer. */
  function forgetOld(nowMs: number): void {
    for (const [key, failure] of failures) if (nowMs - failure.untilMs > maxMs) failures.delete(key);
  }

  return {
    check(key) {
      const failure = failures.get(key);
      if (failure === undefined) return;
      const leftMs = failure.untilMs - clock.now();
      if (leftMs <= 0) return;
      throw new KvError(
        "KV_HANDSHAKE_BACKED_OFF",
        `${key} is not tried again for ${Math.ceil(leftMs)} ms, after: ${failure.error.message}`,
        { cause: failure.error, details: { peer: key, leftMs, delayMs: failure.delayMs } },
      );
    },
    failed(key, error) {
      const nowMs = clock.now();
      forgetOld(nowMs);
      const before = failures.get(key);
      const delayMs = before === undefined ? minMs : Math.min(before.delayMs * 2, maxMs);
      failures.set(key, { delayMs, untilMs: nowMs + delayMs, error });
    },
    succeeded: (key) => void failures.delete(key),
    get size() {
      return failures.size;
    },
  };
}
