import type { Agent, Span, Tracer, Transfer, TransferRequest, TransferResult } from "@kv/interface";
import { noMetrics } from "@kv/interface";
import { expect, test } from "vitest";
import { TransferMetrics, traced, transferAll } from "./transfers.js";

test("a span ends with its work, or with its error", async () => {
  const ends: unknown[] = [];
  const tracer: Tracer = {
    start: () => ({ end: (error) => ends.push(error) }) as Partial<Span> as Span,
  };
  const thrown = new Error("thrown");
  const rejected = new Error("rejected");
  expect(traced(tracer, "s", {}, () => 1)).toBe(1);
  expect(await traced(tracer, "s", {}, async () => 2)).toBe(2);
  const throws = () => {
    throw thrown;
  };
  expect(() => traced(tracer, "s", {}, throws)).toThrow(thrown);
  await expect(traced(tracer, "s", {}, () => Promise.reject(rejected))).rejects.toBe(rejected);
  expect(ends).toEqual([undefined, undefined, thrown, rejected]);
});

test.each([
  ["a transfer that cannot start", "throws"],
  ["a transfer that fails", "fails"],
  ["what else fails", "is told"],
])("%s aborts the others and is the error of all, and none starts after it", async (_, how) => {
  const error = new Error(how);
  const signals: (AbortSignal | undefined)[] = [];
  const transfer = ({ signal }: TransferRequest): Transfer => {
    if (signals.push(signal) === 1) {
      const done = new Promise<TransferResult>((_resolve, reject) => {
        signal?.addEventListener("abort", () => reject(new Error("aborted")));
      });
      return { done, released: Promise.resolve() };
    }
    if (how === "throws") throw error;
    return { done: Promise.reject(error), released: Promise.resolve() };
  };
  const request = { operation: "READ", remote: { remote: "p" } } as TransferRequest;
  const agent = { transfer, backends: ["UCX"] } as Partial<Agent> as Agent;
  const work = transferAll(
    { agent, metrics: new TransferMetrics(noMetrics) },
    { signal: new AbortController().signal, parent: undefined },
    async (transfers) => {
      const first = transfers.start(request);
      if (how === "is told") transfers.fail(error);
      else await transfers.start(request);
      await Promise.all([first, transfers.start(request)]);
      expect(transfers.hasFailed).toBe(true);
    },
  );
  await expect(work).rejects.toBe(error);
  expect(signals).toHaveLength(how === "is told" ? 1 : 2);
});
