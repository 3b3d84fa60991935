import { describe, expect, test } from "vitest";
import { nixlMissing } from "../../packages/nixl/test/support/nixl-available.js";
import { runExits } from "./run-exits.js";

const COUNT = 50;
const seed = process.env.KV_SEED ?? `${Date.now()}`;

describe.skipIf(nixlMissing)(
  `processes that end at random places of their lives (${nixlMissing ?? "found"})`,
  () => {
    test(`${COUNT} of ${COUNT} end with exit code 0 and all of their output`, {
      timeout: 600_000,
    }, async () => {
      const complaints: string[] = [];
      let ended = 0;
      await runExits({
        seed,
        numbers: Array.from({ length: COUNT }, (_, index) => index),
        jobs: 2,
        onEnd(complaint) {
          ended += 1;
          if (complaint !== undefined) complaints.push(complaint);
        },
      });
      expect(complaints, `seed ${seed}`).toEqual([]);
      expect(ended).toBe(COUNT);
    });
  },
);
