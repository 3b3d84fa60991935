import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import { createEnding } from "./ending.js";

const why = new KvError("KV_REQUEST_ABORTED", "gone");
const other = new KvError("KV_REQUEST_TIMEOUT", "late");

test("listeners are told once, with the first reason; those taken away are not", () => {
  const ending = createEnding();
  const told: string[] = [];
  ending.onEnd(() => told.push("stays"));
  const leave = ending.onEnd(() => told.push("left"));
  leave();
  expect([ending.ended, ending.reason]).toEqual([false, undefined]);
  ending.end(why);
  ending.end(other);
  expect([ending.ended, ending.reason]).toEqual([true, why]);
  ending.onEnd(() => told.push("late"));
  expect(told).toEqual(["stays", "late"]);
});

test.each(["before", "after"])("a signal that is asked for %s the end has its reason", (when) => {
  const ending = createEnding();
  const early = when === "before" ? ending.signal : undefined;
  ending.end(why);
  const signal = early ?? ending.signal;
  expect([signal.aborted, signal.reason, ending.signal === signal]).toEqual([true, why, true]);
});
