import type { Clock, Random, Timer } from "@kv/interface";
import { decodeOk, prefillOk } from "@kv/testing/http/fake-upstream";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import { createProxy } from "../../src/index.js";
import { runFleet, runPair } from "../support/set-up.js";

/** A timer that only works as a method of its object, as a class's does. */
class ClassTimer implements Timer {
  readonly #handle: NodeJS.Timeout;

  constructor(run: () => void, delayMs: number) {
    this.#handle = setTimeout(run, delayMs).unref();
  }

  cancel(): void {
    clearTimeout(this.#handle);
  }
}

class ClassClock implements Clock {
  readonly #startedAtMs = performance.now();

  now(): number {
    return performance.now() - this.#startedAtMs;
  }

  setTimer(run: () => void, delayMs: number): Timer {
    return new ClassTimer(run, delayMs);
  }
}

class ClassRandom implements Random {
  #serial = 0;

  next(): number {
    return 0;
  }

  uuid(): string {
    this.#serial += 1;
    return `id-${this.#serial}`;
  }
}

test("serves with a random source that is an instance of a class", async () => {
  for (const mode of ["pull", "push", "auto"] as const) {
    const { ask } = await runFleet([prefillOk], [decodeOk], { mode, random: new ClassRandom() });
    expect((await ask()).status).toBe(200);
  }
});

test("close() resolves with a clock whose timers are instances of a class", async () => {
  const proxy = createProxy({ prefillers: ["p:1"], decoders: ["d:1"], clock: new ClassClock() });
  await proxy.listen({ port: 0 });
  await expect(proxy.close()).resolves.toBeUndefined();
});

test("began_at in the history follows the proxy's clock", async () => {
  const clock = manualClock();
  const { ask, adminUrl } = await runPair({}, { clock });
  await ask();
  clock.advance(60_000);
  await ask();
  const requests = (await (await fetch(`${adminUrl}/requests`)).json()) as { began_at: string }[];
  const [first = 0, second = 0] = requests.map(({ began_at: beganAt }) => Date.parse(beganAt));
  expect(second - first).toBe(60_000);
});
