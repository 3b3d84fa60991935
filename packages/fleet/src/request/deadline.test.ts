import { KvError } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import { Deadline } from "./deadline.js";

test("aborts when a phase expires, short or long, and not when it ends in time", () => {
  const clock = manualClock();
  const deadline = new Deadline({ clock, requestMs: 3_600_000 });
  deadline.startPhase("the first", 50);
  clock.advance(49);
  deadline.startPhase("the second", 100_000);
  clock.advance(99_998);
  expect(deadline.aborted).toBe(false);
  clock.advance(2);
  expect(deadline.reason).toMatchObject({
    code: "KV_REQUEST_TIMEOUT",
    message: "the second took longer than 100000 ms",
  });
});

test("after a phase has ended, only the whole request has a time limit", () => {
  const clock = manualClock();
  const deadline = new Deadline({ clock, requestMs: 90_000 });
  deadline.startPhase("the first", 50);
  deadline.endPhase();
  clock.advance(89_998);
  expect(deadline.aborted).toBe(false);
  clock.advance(2);
  expect(deadline.reason?.message).toBe("the request took longer than 90000 ms");
});

test("a fork has its own phases and aborts with its parent, unless it is closed", () => {
  const clock = manualClock();
  const deadline = new Deadline({ clock, requestMs: 90_000 });
  const [late, other, closed] = [deadline.fork(), deadline.fork(), deadline.fork()];
  late.startPhase("its phase", 10);
  closed.close();
  clock.advance(10);
  expect([late.aborted, other.aborted, deadline.aborted]).toEqual([true, false, false]);
  const gone = new KvError("KV_REQUEST_ABORTED", "gone");
  deadline.abort(gone);
  expect([other.reason, closed.aborted]).toEqual([gone, false]);
});

test("never aborts once it is closed", () => {
  const clock = manualClock();
  const deadline = new Deadline({ clock, requestMs: 10 });
  deadline.close();
  deadline.startPhase("a phase", 5);
  clock.advance(100_000);
  expect(deadline.aborted).toBe(false);
});

const why = new KvError("KV_REQUEST_ABORTED", "gone");
const other = new KvError("KV_REQUEST_TIMEOUT", "late");

test("calls listeners once, with the first reason, and not those that were removed", () => {
  const abort = new Deadline({ clock: manualClock() });
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
