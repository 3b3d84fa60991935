import { systemClock } from "@kv/interface";
import { expect, test } from "vitest";
import { AbandonedPrefills } from "./generation-route.js";

test("without a limit, nothing is kept of clients that leave", () => {
  let asked = 0;
  const clock = {
    ...systemClock(),
    now: () => {
      asked += 1;
      return 0;
    },
  };
  const abandoned = new AbandonedPrefills({ clock, limit: Number.POSITIVE_INFINITY, windowMs: 1000 });
  abandoned.add("a");
  abandoned.check("a");
  expect(asked).toBe(0);
});
