import type { Clock } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { leavesNothing } from "@kv/testing/nothing-left";
import { describe, expect, it } from "vitest";
import { Leases } from "./leases.js";

function setUp(extensionMs = 20_000) {
  const clock = manualClock(1000);
  const expired: string[] = [];
  const leases = new Leases({ clock, extensionMs, onExpired: (id) => expired.push(id) });
  const grant = (wireId: string, expiresAtMs: number, unattendedExpiresAtMs?: number) =>
    leases.grant({ wireId, expiresAtMs, unattendedExpiresAtMs }, clock.now());
  leavesNothing(
    () => ({ leases: leases.size, timers: clock.pending() }),
    () => clock.advance(1_000_000),
  );
  return { clock, expired, grant, leases };
}

describe("leases", () => {
  it("expire at their deadlines, each by a timer of its own", () => {
    const { clock, expired, grant, leases } = setUp();
    grant("b", 31_000);
    grant("a", 11_000);
    expect(clock.pending()).toBe(2);
    clock.advance(9999);
    expect(expired).toEqual([]);
    clock.advance(1);
    expect(expired).toEqual(["a"]);
    expect(leases.has("a")).toBe(false);
    clock.advance(20_000);
    expect(expired).toEqual(["a", "b"]);
    expect(clock.pending()).toBe(0);
  });

  it("end on the local clock when the scheduler's has another origin", () => {
    const { clock, expired, leases } = setUp();
    leases.grant({ wireId: "a", expiresAtMs: 9_010_000 }, 9_000_000);
    clock.advance(9999);
    expect(expired).toEqual([]);
    clock.advance(1);
    expect(expired).toEqual(["a"]);
  });

  it("are extended by a heartbeat to max(current deadline, now + extension)", () => {
    const { clock, expired, grant, leases } = setUp();
    grant("a", 31_000);
    leases.extend(["a", "unknown"]);
    clock.advance(25_000);
    leases.extend(["a"]);
    clock.advance(19_999);
    expect(expired).toEqual([]);
    clock.advance(1);
    expect(expired).toEqual(["a"]);
  });

  it("expire at the unattended deadline without heartbeats, and at the lease deadline after a heartbeat", () => {
    const { clock, expired, grant, leases } = setUp();
    grant("silent", 31_000, 121_000);
    grant("beating", 31_000, 121_000);
    leases.extend(["beating"]);
    clock.advance(29_999);
    expect(expired).toEqual([]);
    clock.advance(1);
    expect(expired).toEqual(["beating"]);
    clock.advance(90_000);
    expect(expired).toEqual(["beating", "silent"]);
  });

  it("do not call onExpired after release or close, and leave no timer", () => {
    const { clock, expired, grant, leases } = setUp();
    grant("a", 2000);
    expect(leases.release("a")).toBe(true);
    expect(leases.release("a")).toBe(false);
    expect(clock.pending()).toBe(0);
    grant("b", 2000);
    leases.close();
    clock.advance(5000);
    expect(expired).toEqual([]);
    expect(clock.pending()).toBe(0);
  });

  it("do not loop over timers when the remaining time is below the clock's resolution", () => {
    const base = manualClock(2_100_000);
    let timers = 0;
    const skewed: Clock = {
      now: () => base.now() - 2_099_000,
      setTimer(run, delayMs) {
        timers += 1;
        if (timers > 20_000) throw new Error("a loop of timers");
        return base.setTimer(run, delayMs);
      },
    };
    const expired: string[] = [];
    const leases = new Leases({
      clock: skewed,
      extensionMs: 1,
      onExpired: (id) => expired.push(id),
    });
    // The skewed clock has smaller values, hence a finer resolution: adding the remaining time to
    // the base clock rounds it away.
    for (let i = 0; i < 2000; i++) {
      const expiresAtMs = skewed.now() + 1 + Math.sqrt(i);
      leases.grant({ wireId: `r${i}`, expiresAtMs }, skewed.now());
      base.advance(Math.SQRT1_2);
    }
    base.advance(100);
    expect(expired.length).toBe(2000);
  });

  it("that are granted again or attended keep one timer each", () => {
    const { clock, expired, grant, leases } = setUp();
    grant("a", 2000);
    grant("a", 31_000, 121_000);
    leases.extend(["a"]);
    leases.extend(["a"]);
    expect(clock.pending()).toBe(1);
    clock.advance(29_999);
    expect(expired).toEqual([]);
    clock.advance(1);
    expect(expired).toEqual(["a"]);
    expect(clock.pending()).toBe(0);
  });

  it("can be granted again by onExpired", () => {
    const clock = manualClock();
    let again = 1;
    const leases = new Leases({
      clock,
      extensionMs: 1,
      onExpired: (id) => {
        const nowMs = clock.now();
        if (again-- > 0) leases.grant({ wireId: id, expiresAtMs: nowMs + 10 }, nowMs);
      },
    });
    leases.grant({ wireId: "a", expiresAtMs: 5 }, 0);
    clock.advance(100);
    expect(leases.size).toBe(0);
    expect(clock.pending()).toBe(0);
  });
});
