import { manualClock } from "@kv/testing/manual-clock";
import { expect, it } from "vitest";
import { Turns } from "./turns.js";

const turn = () => new Promise<void>((resolve) => setImmediate(resolve));

it("runs so many parts in one turn of the event loop, in order, and lets others run between the turns", async () => {
  const turns = new Turns(2, manualClock());
  const ran: number[] = [];
  const seen: number[][] = [];
  for (let part = 0; part < 5; part += 1) turns.later(() => ran.push(part));
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

it("runs what a part adds in a later turn", async () => {
  const turns = new Turns(8, manualClock());
  const ran: string[] = [];
  turns.later(() => {
    ran.push("first");
    turns.later(() => ran.push("added"));
  });
  await turn();
  expect(ran).toEqual(["first"]);
  await turn();
  expect(ran).toEqual(["first", "added"]);
});

it("rests three times as long as a part took, with the promise that it resolved", async () => {
  const clock = manualClock();
  const turns = new Turns(1, clock);
  const ran: number[] = [];
  for (const part of [1, 2]) {
    turns.later(() => {
      clock.advance(4);
      void Promise.resolve().then(() => {
        clock.advance(6);
        ran.push(part);
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
  // What comes during the rest waits, too.
  turns.later(() => ran.push(3));
  await turn();
  expect(ran).toEqual([1, 2]);
  clock.advance(30);
  await turn();
  expect(ran).toEqual([1, 2, 3]);
});
