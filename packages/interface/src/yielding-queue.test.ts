import { manualClock } from "@kv/testing/manual-clock";
import { expect, it } from "vitest";
import { YieldingQueue } from "./index.js";

const turn = () => new Promise<void>((resolve) => setImmediate(resolve));

it("runs stepsPerTurn steps in one turn of the event loop, in order, and lets others run between the turns", async () => {
  const queue = new YieldingQueue({ clock: manualClock(), stepsPerTurn: 2 });
  const ran: number[] = [];
  const seen: number[][] = [];
  for (let step = 0; step < 5; step += 1) queue.push(() => ran.push(step));
  expect(ran).toEqual([]);
  for (let at = 0; at < 3; at += 1) {
    await turn();
    seen.push([...ran]);
  }
  expect(seen).toEqual([
    [0, 1],
    [0, 1, 2, 3],
    [0, 1, 2, 3, 4],
  ]);
});

it("runs a step that another step pushes in a later turn", async () => {
  const queue = new YieldingQueue({ clock: manualClock(), stepsPerTurn: 8 });
  const ran: string[] = [];
  queue.push(() => {
    ran.push("first");
    queue.push(() => ran.push("added"));
  });
  await turn();
  expect(ran).toEqual(["first"]);
  await turn();
  expect(ran).toEqual(["first", "added"]);
});

it("yields three times as long as a step took, with the callbacks of the promise that it resolved", async () => {
  const clock = manualClock();
  const queue = new YieldingQueue({ clock: clock });
  const ran: number[] = [];
  for (const step of [1, 2]) {
    queue.push(() => {
      clock.advance(4);
      void Promise.resolve().then(() => {
        clock.advance(6);
        ran.push(step);
      });
    });
  }
  await turn();
  await turn();
  expect(ran).toEqual([1]);
  clock.advance(29);
  await turn();
  expect(ran).toEqual([1]);
  clock.advance(1);
  await turn();
  expect(ran).toEqual([1, 2]);
  // A step that is pushed while the queue yields waits, too.
  queue.push(() => ran.push(3));
  await turn();
  expect(ran).toEqual([1, 2]);
  clock.advance(30);
  await turn();
  expect(ran).toEqual([1, 2, 3]);
});

it("waits for short steps, too, once they have taken a third of a millisecond together", async () => {
  const clock = manualClock();
  const queue = new YieldingQueue({ clock });
  let ran = 0;
  for (let step = 0; step < 12; step += 1)
    queue.push(() => {
      clock.advance(0.1);
      ran += 1;
    });
  for (let at = 0; at < 8; at += 1) await turn();
  expect(ran).toBe(4);
  clock.advance(1);
  for (let at = 0; at < 8; at += 1) await turn();
  expect(ran).toBe(7);
});

it("goes on with work for sliceMs in one step", async () => {
  const clock = manualClock();
  const queue = new YieldingQueue({ clock, sliceMs: 10 });
  let steps = 0;
  function* work() {
    for (; steps < 8; steps += 1) {
      clock.advance(4);
      yield;
    }
    return "done";
  }
  const ended = queue.run(work());
  await turn();
  await turn();
  expect(steps).toBe(2);
  for (let at = 0; at < 6; at += 1) {
    clock.advance(36);
    await turn();
    await turn();
  }
  expect([await ended, steps]).toEqual(["done", 8]);
});
