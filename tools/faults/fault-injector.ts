import type { SeededRandom } from "@kv/transport-memory";

/**
 * Faults of a notification: it is lost, refused, sent twice or sent late; an old one is sent again;
 * a damaged one is sent first.
 */
export type NotifyFault = "lost" | "refused" | "twice" | "late" | "stale" | "damaged";
/**
 * Faults of a transfer: it moves its bytes and fails; it begins late; it hangs until it is aborted.
 */
export type TransferFault = "failed" | "late" | "hangs";
/**
 * Faults of a side-channel request: no answer, unreachable, an answer of random bytes; or random
 * bytes are sent to the listener first.
 */
export type RequestFault = "unanswered" | "unreachable" | "noise" | "junk";

/** How often each occurs, per hundred operations. */
export const NOTIFY_FAULTS: Readonly<Record<NotifyFault, number>> = {
  lost: 2,
  refused: 1,
  twice: 3,
  late: 2,
  stale: 2,
  damaged: 3,
};
export const TRANSFER_FAULTS: Readonly<Record<TransferFault, number>> = {
  failed: 1.5,
  late: 3,
  hangs: 0.5,
};
export const REQUEST_FAULTS: Readonly<Record<RequestFault, number>> = {
  unanswered: 1,
  unreachable: 2,
  noise: 2,
  junk: 3,
};

/** Draws at random which fault an operation gets, and counts the faults. */
export interface FaultInjector {
  readonly random: SeededRandom;
  /** The fault to inject, or undefined for none. `chances` are in percent. */
  draw<Kind extends string>(
    operation: string,
    chances: Readonly<Record<Kind, number>>,
  ): Kind | undefined;
  counts(): Readonly<Record<string, number>>;
  /** Injects no faults from now on. */
  end(): void;
}

export function createFaultInjector(random: SeededRandom): FaultInjector {
  const counts: Record<string, number> = {};
  let ended = false;
  return {
    random,
    draw<Kind extends string>(operation: string, chances: Readonly<Record<Kind, number>>) {
      let left = random.next() * 100;
      if (ended) return undefined;
      for (const [kind, chance] of Object.entries<number>(chances)) {
        left -= chance;
        if (left >= 0) continue;
        const name = `${operation} ${kind}`;
        counts[name] = (counts[name] ?? 0) + 1;
        return kind as Kind;
      }
      return undefined;
    },
    counts: () => ({ ...counts }),
    end() {
      ended = true;
    },
  };
}
