// A long suite: ends processes in each state of an agent.
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test } from "vitest";
import { BOTH_BACKENDS } from "../support/both-backends.js";
import { runChild } from "../support/run-child.js";

const CODES: Readonly<Record<string, number>> = {
  closed: 0,
  "left-open": 0,
  exit: 0,
  "exit-7": 7,
  "exit-while-creating": 0,
  "exit-in-transfer": 0,
  "left-open-in-transfer": 0,
  "heap-growing-while-creating": 0,
  "much-output": 0,
  throws: 1,
  "waiting-reader": 0,
  "worker-ends": 0,
  "worker-terminated": 0,
  "worker-terminated-in-transfer": 0,
  "exit-in-copy": 0,
  "worker-terminated-in-copy": 0,
  "several-workers": 0,
};

for (const { backend, missing } of BOTH_BACKENDS) {
  describe.skipIf(missing)(
    `exit of a process that used NIXL over ${backend} (${missing ?? "found"})`,
    () => {
      test.each(Object.entries(CODES))("%s: exit code %i", async (ending, code) => {
        const env = { NIXL_BACKEND: backend };
        const end = await runChild("lifecycle.ts", [ending], { env });
        expect(end, end.stderr).toMatchObject({ code, signal: null });
        if (ending === "much-output") expect(end.stdout.length).toBe(1 << 20);
        if (ending === "waiting-reader") expect(end.stdout).toBe("the reader ended");
      });
    },
  );
}

// UCX's InfiniBand module crashes at exit where the system has libibverbs as well.
describe.skipIf(nixlMissing)(
  `exit of a process with UCX's InfiniBand module (${nixlMissing ?? "found"})`,
  () => {
    test.each(["closed", "exit-7", "worker-terminated", "much-output"])("%s", async (ending) => {
      const env = { NIXL_BACKEND: "UCX", UCX_MODULES: "^cuda" };
      const end = await runChild("lifecycle.ts", [ending], { env });
      expect([end.code, end.signal]).toEqual([CODES[ending], null]);
      if (ending === "much-output") expect(end.stdout.length).toBe(1 << 20);
    });
  },
);
