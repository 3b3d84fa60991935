import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import { LazyAbort } from "./deadline.js";

const why = new KvError("KV_REQUEST_ABORTED", "gone");
const other = new KvError("KV_REQUEST_TIMEOUT", "late");

test("calls listeners once, with the first reason, and not those that were removed", () => {
  const abort = new LazyAbort();
  const called: string[] = [];
  abort.onAbort(() => called.push("stays"));
  const leave = abort.onAbort(() => called.push("left"));
  leave();
  expect([abort.aborted, abort.reason]).toEqual([false, undefined]);
  abort.abort(why);
  abort.abort(other);
  expect([abort.aborted, abort.reason]).toEqual([true, why]);
  abort.onAbort(() => called.push("late"));
  expect(called).toEqual(["stays", "late"]);
});

test.each(["before", "after"])("a signal that is read %s the abort has its reason", (when) => {
  const abort = new LazyAbort();
  const early = when === "before" ? abort.signal : undefined;
  abort.abort(why);
  const signal = early ?? abort.signal;
  expect([signal.aborted, signal.reason, abort.signal === signal]).toEqual([true, why, true]);
});
