import { KvError } from "@kv/interface";
import type { SeededRandom } from "@kv/transport-memory";
import type { FaultEngine, FaultEngineOrder, FaultFixture } from "./fault-fixture.js";

/** The place of an engine: its address, where one process follows another. */
export interface Seat {
  readonly hostName: string;
  readonly tpSize: number;
  readonly blockSize: number;
  readonly skewMs: number;
  starts: number;
  engine: FaultEngine | undefined;
}

export const seat = (hostName: string, tpSize: number, blockSize = 16, skewMs = 0): Seat => ({
  hostName,
  tpSize,
  blockSize,
  skewMs,
  starts: 0,
  engine: undefined,
});

type Order = Pick<FaultEngineOrder, "numBlocks" | "receiveDeadlineMs" | "extra"> &
  Partial<FaultEngineOrder>;

/** The engines of one run, and what their requests came to. */
export class Seats {
  readonly #fixture: FaultFixture;
  readonly #order: Order;
  readonly #startedMs: number;
  readonly violations: string[] = [];
  violationCount = 0;
  /** Requests by outcome: "ok", or the code of the error. */
  readonly outcomes: Record<string, number> = {};

  constructor(fixture: FaultFixture, order: Order) {
    this.#fixture = fixture;
    this.#order = order;
    this.#startedMs = fixture.clock.now();
  }

  readonly violation = (what: string): void => {
    this.violationCount += 1;
    const atMs = this.#fixture.clock.now() - this.#startedMs;
    if (this.violations.length < 10) this.violations.push(`at ${atMs.toFixed(1)} ms: ${what}`);
  };

  readonly sleep = (ms: number) =>
    new Promise<void>((resolve) => void this.#fixture.clock.setTimer(resolve, ms));

  /** "ok", or the code of the error, which must have one. */
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

  /** Half of the restarts keep the engine id, as an engine with a configured id does. */
  async start(place: Seat, random: SeededRandom, hasNewId = false): Promise<void> {
    place.starts += 1;
    const generation = !hasNewId && random.next() < 0.5 ? 0 : place.starts;
    const { hostName, tpSize, blockSize, skewMs } = place;
    place.engine = await this.#fixture.start(
      {
        layerwise: false,
        ...this.#order,
        hostName,
        tpSize,
        blockSize,
        skewMs,
        violation: this.violation,
        engineId: `${hostName}-${generation}`,
        // When KV does not arrive, one decode engine computes it, and the others fail the request.
        loadFailurePolicy: hostName === "d1" ? "recompute" : "fail",
      },
      random,
    );
  }

  async kill(place: Seat): Promise<void> {
    const { engine } = place;
    place.engine = undefined;
    await engine?.kill();
  }

  /** Closes the engines when they should hold nothing. Returns what was held, before and after. */
  async close(places: readonly Seat[]): Promise<Record<string, number>> {
    const left: Record<string, number> = {};
    const look = (where: string, counts: Readonly<Record<string, number>>) => {
      for (const [name, count] of Object.entries(counts))
        if (count !== 0) left[where + name] = count;
    };
    const engines = places.flatMap(({ engine }) => engine ?? []);
    // Blocks that an engine still keeps have a lease, and every lease ends.
    await this.#fixture.waitUntilIdle(engines);
    for (const { engine, hostName } of places)
      look(`${hostName}.`, (await engine?.outstanding()) ?? {});
    await this.#fixture.settle(Promise.all(engines.map((engine) => engine.close())));
    look("", await this.#fixture.countHeld());
    return left;
  }
}
