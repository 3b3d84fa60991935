import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import { AbandonedPrefills } from "./abandoned-prefills.js";

const options = { limitMs: 1000, clientHeader: undefined };

test("R8: any number of requests that cost prefill instances nothing is no attack; what they have worked is, until it leaves the window", () => {
  const clock = manualClock();
  const abandoned = new AbandonedPrefills({ ...options, clock });
  for (let at = 0; at < 10_000; at += 1) abandoned.add("a", 0);
  for (let at = 0; at < 30; at += 1) abandoned.add("a", 20);
  abandoned.check("a");
  clock.advance(10_000);
  abandoned.add("a", 500);
  expect(() => abandoned.check("a")).toThrow(
    expect.objectContaining({
      code: "KV_PROXY_OVERLOADED",
      message: expect.stringContaining("have worked 1.1 s"),
      hint: expect.stringContaining("limits.clientHeader"),
    }),
  );
  abandoned.check("b");
  clock.advance(20_000);
  abandoned.check("a");
});

test("without a limit, nothing is kept of clients that leave", () => {
  const clock = manualClock();
  const abandoned = new AbandonedPrefills({ ...options, clock, limitMs: Number.POSITIVE_INFINITY });
  abandoned.add("a", 1_000_000);
  abandoned.check("a");
});
