// A long suite: 50 processes that exit in the middle of something.
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test } from "vitest";
import { runExits } from "./run-exits.js";

const COUNT = 50;
const seed = process.env.KV_SEED ?? `${Date.now()}`;

describe.skipIf(nixlMissing)(
  `processes that end at random places (${nixlMissing ?? "found"})`,
  () => {
    test(`all ${COUNT} end with exit code 0 and their whole output`, {
      timeout: 600_000,
    }, async () => {
      const failures: string[] = [];
      let ended = 0;
      await runExits({
        seed,
        numbers: Array.from({ length: COUNT }, (_, index) => index),
        jobs: 2,
        onEnd(failure) {
          ended += 1;
          if (failure !== undefined) failures.push(failure);
        },
      });
      expect(failures, `seed ${seed}`).toEqual([]);
      expect(ended).toBe(COUNT);
    });
  },
);
