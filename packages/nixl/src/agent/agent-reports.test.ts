import { type Clock, type LogFields, noMetrics, silentLog } from "@kv/interface";
import { expect, test } from "vitest";
import { DroppedNotifications } from "./agent-reports.js";

/** A clock whose timers fire when `advance` reaches them. */
function manualClock(): Clock & { advance(ms: number): void } {
  let nowMs = 0;
  const timers = new Set<{ run: () => void; atMs: number }>();
  return {
    now: () => nowMs,
    setTimer(run, delayMs) {
      const timer = { run, atMs: nowMs + delayMs };
      timers.add(timer);
      return { cancel: () => timers.delete(timer) };
    },
    advance(ms) {
      nowMs += ms;
      for (const timer of timers) {
        if (timer.atMs > nowMs) continue;
        timers.delete(timer);
        timer.run();
      }
    },
  };
}

test("a warning says how many were dropped and from whom, at once and then every 10 s", () => {
  const clock = manualClock();
  const warnings: LogFields[] = [];
  const log = {
    ...silentLog,
    warn: (_event: string, fields: LogFields = {}) => void warnings.push(fields),
  };
  const dropped = new DroppedNotifications("d0", { clock, log, metrics: noMetrics });
  dropped.add("p0");
  dropped.add("p0", 4);
  dropped.add("p1");
  dropped.add(undefined, 9);
  clock.advance(1);
  expect(warnings).toMatchObject([
    { agent: "d0", senders: { p0: 5, p1: 1 }, otherSenders: 9, total: 15 },
  ]);
  for (let sender = 0; sender < 100; sender++) dropped.add(`forged ${sender}`);
  clock.advance(9000);
  expect(warnings.length).toBe(1);
  clock.advance(1000);
  expect(warnings.length).toBe(2);
  expect(Object.keys(warnings[1]?.["senders"] ?? {}).length).toBe(16);
  expect(warnings[1]).toMatchObject({ otherSenders: 84, total: 115 });
  dropped.add("p0");
  dropped.close();
  dropped.close();
  expect(warnings.length).toBe(3);
  expect(warnings[2]).toMatchObject({ senders: { p0: 1 }, otherSenders: 0, total: 116 });
});
