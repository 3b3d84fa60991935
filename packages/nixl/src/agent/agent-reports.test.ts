import { noMetrics } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test } from "vitest";
import { DroppedNotifications } from "./agent-reports.js";

test("a warning says how many were dropped and from whom, at once and then every 10 s", () => {
  const clock = manualClock();
  const { log, events } = recordedLog();
  const warned = () => events.map(({ fields }) => fields);
  const dropped = new DroppedNotifications("d0", { clock, log, metrics: noMetrics });
  dropped.add("p0");
  dropped.add("p0", 4);
  dropped.add("p1");
  dropped.add(undefined, 9);
  clock.advance(1);
  expect(warned()).toMatchObject([
    { agent: "d0", senders: { p0: 5, p1: 1 }, otherSenders: 9, total: 15 },
  ]);
  for (let sender = 0; sender < 100; sender++) dropped.add(`forged ${sender}`);
  clock.advance(9000);
  expect(events.length).toBe(1);
  clock.advance(1000);
  expect(events.length).toBe(2);
  expect(Object.keys(warned()[1]?.["senders"] ?? {}).length).toBe(16);
  expect(warned()[1]).toMatchObject({ otherSenders: 84, total: 115 });
  dropped.add("p0");
  dropped.close();
  dropped.close();
  expect(events.length).toBe(3);
  expect(warned()[2]).toMatchObject({ senders: { p0: 1 }, otherSenders: 0, total: 116 });
});
