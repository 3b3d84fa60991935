import type { Clock } from "@kv/interface";
import type { SeededRandom } from "@kv/transport-memory";

/** Decides when engines of a fault run die. */
interface Deaths {
  /** Before a client takes its next request: waits if it must not take more now. */
  mayTake(taken: number): Promise<void> | void;
  next(random: SeededRandom): Promise<void>;
  mourn(random: SeededRandom): Promise<void>;
  over(): void;
  /** No client takes requests any more: `next` resolves, and no engine dies. */
  end(): void;
  readonly ended: boolean;
}

/** An engine dies every 2 to 10 s of a virtual clock: at the same times with the same seed. */
export function deathsByTime(clock: Clock): Deaths {
  const sleep = (ms: number) => new Promise<void>((resolve) => void clock.setTimer(resolve, ms));
  return {
    mayTake() {},
    next: (random) => sleep(2000 + random.next() * 8000),
    mourn: (random) => sleep(random.next() * 1500),
    over() {},
    end() {},
    ended: false,
  };
}

/**
 * An engine dies each time that clients have taken `every` more requests. They take at most half as
 * many more before its successor has started: the number of deaths is the same on any machine.
 */
export function deathsByRequests(every: number): Deaths {
  let point = every;
  let taken = 0;
  let ended = false;
  let wake: (() => void) | undefined;
  let waiting: (() => void)[] = [];
  return {
    mayTake(now) {
      taken = now;
      if (taken >= point) wake?.();
      if (taken >= point + every / 2) return new Promise((resolve) => void waiting.push(resolve));
    },
    async next() {
      if (taken < point && !ended) await new Promise<void>((resolve) => (wake = resolve));
      wake = undefined;
    },
    async mourn() {},
    over() {
      point += every;
      for (const resolve of waiting) resolve();
      waiting = [];
    },
    end() {
      ended = true;
      wake?.();
    },
    get ended() {
      return ended;
    },
  };
}
