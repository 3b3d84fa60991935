import type { Span, Tracer } from "@kv/interface";
import { expect, test } from "vitest";
import { traced } from "./transfers.js";

test("a span ends with its work, or with its error", async () => {
  const ends: unknown[] = [];
  const span: Partial<Span> = { end: (error) => ends.push(error) };
  const tracer: Tracer = { start: () => span as Span };
  const [thrown, rejected] = [new Error("thrown"), new Error("rejected")];
  const throws = () => {
    throw thrown;
  };
  expect(await traced(tracer, "s", {}, async () => 2)).toBe(2);
  expect(() => traced(tracer, "s", {}, throws)).toThrow(thrown);
  await expect(traced(tracer, "s", {}, () => Promise.reject(rejected))).rejects.toBe(rejected);
  expect(traced(tracer, "s", {}, () => 1)).toBe(1);
  expect(ends).toEqual([undefined, thrown, rejected, undefined]);
});
