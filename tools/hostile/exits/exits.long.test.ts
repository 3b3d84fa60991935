// A long suite: 50 processes that exit in the middle of something.

import { execFile } from "node:child_process";
import { join } from "node:path";
import { promisify } from "node:util";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { bundled } from "@kv/testing/node-programs";
import { describe, expect, test } from "vitest";

const count = Number(process.env.KV_EXITS ?? 50);
const first = Number(process.env.KV_FIRST_EXIT ?? 0);
const seed = process.env.KV_SEED ?? `${Date.now()}`;
const JOBS = 2;
const OUTPUT_BYTES = 1 << 20;

describe.skipIf(nixlMissing)(
  `processes that end at random places (${nixlMissing ?? "found"})`,
  () => {
    test(`all ${count} end with exit code 0 and their whole output`, {
      timeout: 10_000_000,
    }, async () => {
      const file = await bundled(join(import.meta.dirname, "./exit-process.ts"));
      const numbers = Array.from({ length: count }, (_, at) => first + at);
      const ends: object[] = [];
      const runNext = async () => {
        for (let number = numbers.shift(); number !== undefined; number = numbers.shift()) {
          const { stdout, ...end } = await promisify(execFile)(
            process.execPath,
            [file, seed, `${number}`],
            { timeout: 120_000, killSignal: "SIGKILL", maxBuffer: 2 * OUTPUT_BYTES },
          ).catch((error) => error);
          if (end.code !== undefined || stdout.length !== OUTPUT_BYTES)
            ends.push({ ...end, number, written: stdout?.length });
        }
      };
      await Promise.all(Array.from({ length: JOBS }, runNext));
      expect(ends, `seed ${seed}`).toEqual([]);
    });
  },
);
