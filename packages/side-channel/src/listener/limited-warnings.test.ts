import { type LogFields, silentLog } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, it } from "vitest";
import { LimitedWarnings } from "./limits.js";

it("logs the first warning of each reason at once and counts the others every ten seconds", () => {
  const clock = manualClock();
  const lines: [string, LogFields | undefined][] = [];
  const warnings = new LimitedWarnings(clock, {
    ...silentLog,
    warn: (event, fields) => void lines.push([event, fields]),
  });
  for (let at = 0; at < 50_000; at += 1)
    warnings.warn("frame-refused", at % 2 === 0 ? "odd" : "even", { at });
  expect(lines).toEqual([
    ["frame-refused", { at: 0, suppressed: 0 }],
    ["frame-refused", { at: 1, suppressed: 0 }],
  ]);
  clock.advance(10_000);
  expect(lines.slice(2)).toEqual([
    ["frame-refused", { at: 49_998, suppressed: 24_999 }],
    ["frame-refused", { at: 49_999, suppressed: 24_999 }],
  ]);
  clock.advance(10_000);
  warnings.warn("frame-refused", "odd", { at: 7 });
  expect(lines.slice(4)).toEqual([["frame-refused", { at: 7, suppressed: 0 }]]);
  clock.advance(20_000);
  expect(lines).toHaveLength(5);
  expect(clock.pending()).toBe(0);
});
