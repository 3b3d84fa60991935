import { type Clock, KvError } from "@kv/interface";
import type { SeededRandom } from "@kv/transport-memory";
import type { FaultEngine, FaultEngineOrder, FaultFixture } from "./fault-fixture.js";

/** An address, where one process follows another. */
export type Seat = ReturnType<typeof seat>;

export const seat = (hostName: string, tpSize: number, blockSize = 16, skewMs = 0) => ({
  hostName,
  tpSize,
  blockSize,
  skewMs,
  starts: 0,
  engine: undefined as FaultEngine | undefined,
});

type Order = Pick<FaultEngineOrder, "numBlocks" | "receiveDeadlineMs" | "extra"> &
  Partial<FaultEngineOrder>;

export function idSuffix(random: SeededRandom): string {
  return random
    .integer(2 ** 32)
    .toString(16)
    .padStart(8, "0");
}

export class Seats {
  readonly #fixture: FaultFixture;
  readonly #order: Order;
  readonly #startedMs: number;
  readonly clock: Clock;
  readonly violations: string[] = [];
  violationCount = 0;
  readonly outcomes: Record<string, number> = {};

  constructor(fixture: FaultFixture, order: Order) {
    this.#fixture = fixture;
    this.#order = order;
    this.clock = fixture.clock;
    this.#startedMs = this.clock.now();
  }

  readonly violation = (what: string): void => {
    this.violationCount += 1;
    const atMs = this.clock.now() - this.#startedMs;
    if (this.violations.length < 10) this.violations.push(`at ${atMs.toFixed(1)} ms: ${what}`);
  };

  readonly sleep = (ms: number) =>
    new Promise<void>((resolve) => void this.clock.setTimer(resolve, ms));

  /** As a proxy knows the engines. Waits while none runs. */
  async living(places: readonly Seat[], random: SeededRandom) {
    for (;;) {
      const up = places.flatMap(({ engine, blockSize }) => (engine ? { engine, blockSize } : []));
      const one = up.length === 0 ? undefined : up[random.integer(up.length)];
      if (one !== undefined) return one;
      await this.sleep(100);
    }
  }

  /** The error must have a code. */
  async outcomeOf(work: Promise<unknown>): Promise<string> {
    try {
      await work;
      return "ok";
    } catch (error) {
      if (KvError.is(error)) return error.code;
      this.violation(`an error without a code: ${String(error)}`);
      return "untyped";
    }
  }

  ended(outcome: string): void {
    this.outcomes[outcome] = (this.outcomes[outcome] ?? 0) + 1;
  }

  async start(place: Seat, random: SeededRandom, hasNewId = false): Promise<void> {
    place.starts += 1;
    const generation = !hasNewId && random.next() < 0.5 ? 0 : place.starts;
    const { hostName, tpSize, blockSize, skewMs } = place;
    const order: FaultEngineOrder = {
      layerwise: false,
      ...this.#order,
      hostName,
      tpSize,
      blockSize,
      skewMs,
      violation: this.violation,
      engineId: `${hostName}-${generation}`,
      // One decode engine computes what does not arrive.
      loadFailurePolicy: hostName === "d1" ? "recompute" : "fail",
    };
    place.engine = await this.#fixture.start(order, random);
  }

  async kill(place: Seat): Promise<void> {
    const { engine } = place;
    place.engine = undefined;
    await engine?.kill();
  }

  async close(places: readonly Seat[]): Promise<Record<string, number>> {
    const left: Record<string, number> = {};
    const look = (where: string, counts: Readonly<Record<string, number>>) => {
      for (const [name, count] of Object.entries(counts))
        if (count !== 0) left[where + name] = count;
    };
    const engines = places.flatMap(({ engine }) => engine ?? []);
    // Every lease ends.
    await this.#fixture.waitUntilIdle(engines);
    for (const { engine, hostName } of places)
      look(`${hostName}.`, (await engine?.outstanding()) ?? {});
    await this.#fixture.settle(Promise.all(engines.map((engine) => engine.close())));
    look("", await this.#fixture.countHeld());
    return left;
  }
}
