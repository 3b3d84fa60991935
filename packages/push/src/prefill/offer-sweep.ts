import type { Clock, Timer } from "@kv/interface";
import type { Offer } from "../control.js";
import type { Matching } from "./registration-matcher.js";

/** Offers that nothing comes for do not wait for ever. */
export interface OfferSweep {
  /** An offer has begun to wait, or waits no longer. */
  arm(): void;
  close(): void;
}

export function createOfferSweep(options: {
  readonly clock: Clock;
  readonly matching: Pick<Matching, "oldestOffer" | "takeOffer">;
  /** How long an offer waits for its prompt. */
  readonly offerMs: number;
  /** Out of the table. */
  expired(key: string, offer: Offer): void;
}): OfferSweep {
  const { clock, matching, offerMs } = options;
  let timer: Timer | undefined;
  let closed = false;

  function arm(): void {
    const oldest = matching.oldestOffer();
    if (oldest === undefined || closed) {
      timer?.cancel();
      timer = undefined;
      return;
    }
    timer ??= clock.setTimer(sweep, Math.max(1, Math.ceil(oldest.sinceMs + offerMs - clock.now())));
  }

  function sweep(): void {
    timer = undefined;
    for (let oldest = matching.oldestOffer(); oldest !== undefined; oldest = matching.oldestOffer()) {
      if (clock.now() < oldest.sinceMs + offerMs) break;
      matching.takeOffer(oldest.key);
      options.expired(oldest.key, oldest.offer);
    }
    arm();
  }

  return {
    arm,
    close() {
      closed = true;
      arm();
    },
  };
}
