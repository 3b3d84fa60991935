import type { Clock } from "@kv/interface";
import type { SeededRandom } from "@kv/transport-memory";

/** When engines of a fault run die. */
export interface Deaths {
  /** Before a client takes its next request: while an engine is dead, only so many more are taken. */
  mayTake(taken: number): Promise<void> | undefined;
  /** Until the next death. */
  next(random: SeededRandom): Promise<void>;
  /** From a death to the restart. */
  mourn(random: SeededRandom): Promise<void>;
  /** The engine that died has a successor. */
  over(): void;
  /** Nobody takes requests any more: `next` resolves, and nothing dies. */
  end(): void;
  readonly ended: boolean;
}

/** Every few seconds of a clock that says the same each time. */
export function deathsByTime(clock: Clock): Deaths {
  const sleep = (ms: number) => new Promise<void>((resolve) => void clock.setTimer(resolve, ms));
  return {
    mayTake: () => undefined,
    next: (random) => sleep(2000 + random.next() * 8000),
    mourn: (random) => sleep(random.next() * 1500),
    over() {},
    end() {},
    ended: false,
  };
}

/** Whenever so many requests were taken, and half as many more before the successor is there: as many deaths on any machine. */
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
      if (taken < point + every / 2) return undefined;
      return new Promise((resolve) => void waiting.push(resolve));
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
