import { readdirSync, readFileSync } from "node:fs";
import { expect, it } from "vitest";

/** vLLM's unit tests of push (pull request 35264), by part, and the name of each counterpart. */
const COUNTERPARTS: Readonly<Record<string, Readonly<Record<string, string>>>> = {
  scheduler: {
    "D stages a registration after allocation": "decode stages a registration after allocation",
    "P stages its blocks at the finish": "prefill stages its blocks when the request finishes",
    "metadata drained on both sides": "building the metadata drains both halves",
    "pending work, from begin to end": "work is pending from its order until a step takes it",
    "output cleanup": "a worker's output removes its requests",
    "watchdog expiry": "the blocks of a registration that timed out",
  },
  matching: {
    "P finished first": "prefill finishes first",
    "D registered first": "decode registers first",
    "match by base id": "prefers the exact id over the base id",
    "malformed `PUSH_REG` dropped": "a malformed registration is refused",
  },
  "start-load": {
    "finished blocks meet a stashed registration":
      "writes finished blocks to a registration that waits",
    "startLoad only enqueues": "only queues the work: no WRITE begins within it",
  },
  notifications: {
    "completion processed": "a done notification counts once for each rank",
    "collectFinished evicts, and wakes the writer":
      "a lease that expires evicts the request and wakes the engine",
  },
  "scheduler, negative": {
    "no transfer parameters": "without transfer parameters",
    "invalid `remote_block_ids`": "with malformed remote_block_ids, and throws",
    "no external tokens": "with no external tokens, but releases the producer's blocks",
    "a request that still runs": "for a request that ended early",
    "empty block groups": "with empty block groups",
    "unknown request in worker output": "with a worker's output about unknown requests",
  },
  "writer, negative": {
    "empty pops": "by a step with nothing to take",
    "base ids that differ": "by base ids that differ",
    "payload that is no map": "by a payload that is not a map, or has an unknown type",
    "request id that is no string": "by a request id that is not a string",
    "the same `PUSH_REG` twice": "by a registration that arrives twice",
    "eviction takes exactly one": "by an eviction, which removes exactly one request",
    "collectFinished with nothing to do":
      "by an engine that takes no further step: a registration alone starts the WRITE",
    "unknown completion": "by heartbeats and withdrawals of unknown requests",
    "empty metadata": "by many empty steps: nothing is kept and no timer runs",
    "registration for an unknown engine":
      "by a registration for another engine, which gets an ended notice",
  },
};

it("each of vLLM's 30 unit tests has a counterpart of its own", () => {
  const folder = new URL("./counterparts/", import.meta.url);
  const tests = readdirSync(folder)
    .filter((file) => file.endsWith(".test.ts"))
    .map((file) => readFileSync(new URL(file, folder), "utf8"))
    .join();
  const names = Object.values(COUNTERPARTS).flatMap((part) => Object.values(part));
  expect(names).toHaveLength(30);
  expect(new Set(names).size).toBe(30);
  expect(names.filter((name) => !tests.includes(name))).toEqual([]);
});
