// A long suite: a process for each allocation that fails.
import { execFile } from "node:child_process";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, describe, expect, test } from "vitest";
import { runChild } from "../support/run-child.js";

const SOURCE = fileURLToPath(new URL("../children/failing_malloc.c", import.meta.url));
const folder = scratchFolder();
let library = "";
beforeAll(async () => {
  library = join(folder, "failing_malloc.so");
  const args = ["-shared", "-fPIC", "-O1", SOURCE, "-o", library, "-ldl"];
  await promisify(execFile)(process.env["CC"] ?? "cc", args);
});

describe.skipIf(fakeMissing)(`agents' threads without memory (${fakeMissing ?? "found"})`, () => {
  // Until no allocation is left to fail.
  test("no std::bad_alloc ends the process: every promise settles, and what is counted is given back", {
    timeout: 600_000,
  }, async () => {
    const seen = new Set<string>();
    for (let number = 1; ; number += Math.ceil(number / 16)) {
      const { code, signal, stdout, stderr } = await runChild("no-memory.ts", [FAKE_NIXL], {
        env: { LD_PRELOAD: library, KV_FAIL_MALLOC: `${number}` },
      });
      const where = `allocation ${number}: ${stderr}`;
      expect({ code, signal }, where).toEqual({ code: 0, signal: null });
      const { failed, given } = JSON.parse(stdout) as { failed: string[]; given: object };
      for (const each of failed) seen.add(each);
      if (Object.keys(given).length > 0) {
        expect(given, where).toEqual({ ended: 0, transfersInFlight: 0, preparedLists: 0 });
      }
      if (!stderr.includes("failed")) break;
    }
    expect(seen).toContain("KV_INTERNAL");
  });
});
