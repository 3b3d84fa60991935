import { fileURLToPath } from "node:url";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { bundled } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, onTestFinished, test } from "vitest";
import { run } from "./run-child.js";

const FILE = fileURLToPath(new URL("./both-backends.ts", import.meta.url));

describe.skipIf(nixlMissing)(
  `tests over a backend that is not available (${nixlMissing ?? "found"})`,
  () => {
    test.each([
      { CI: "", code: 0 },
      { CI: "true", code: 1 },
    ])("with CI=$CI the module exits with $code", async ({ CI, code }) => {
      const only = { ...process.env, CI, NIXL_PLUGIN_DIR: scratchFolder(onTestFinished) } as Record<
        string,
        string
      >;
      const end = await run([await bundled(FILE)], { only });
      expect(end.code, end.stderr).toBe(code);
      if (code !== 0)
        expect(end.stderr).toContain("LIBFABRIC does not load: NIXL has no LIBFABRIC plugin");
    });
  },
);
