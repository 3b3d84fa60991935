import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test } from "vitest";
import { pluginMissing } from "../support/plugins.js";
import { runChild } from "../support/run-child.js";

interface Outcome {
  check: "cuda" | "none";
  code: string;
  message: string;
  hint: string;
}

const posixMissing = await pluginMissing("POSIX");

/**
 * Registers host addresses as device memory with real NIXL, in another process, because NIXL may
 * crash.
 */
describe.skipIf(nixlMissing)(
  `host memory registered as device memory (${nixlMissing ?? "found"})`,
  () => {
    async function outcomes(backend: string): Promise<Outcome[]> {
      const end = await runChild("device-memory.ts", [backend]);
      expect(end, end.stderr).toMatchObject({ code: 0, signal: null });
      return JSON.parse(end.stdout.split("\n").at(-1) ?? "") as Outcome[];
    }

    test("UCX: refused by the check, or without the check by NIXL, whose error is passed on", {
      timeout: 240_000,
    }, async () => {
      const all = await outcomes("UCX");
      expect(all.map(({ code }) => code)).toEqual(Array(4).fill("KV_MEMORY_INVALID"));
      for (const { check, message, hint } of all) {
        if (check === "cuda") expect(message).toContain("are not memory of CUDA device 0");
        else {
          expect(message).toMatch(
            /NIXL could not register 65536 bytes .* as VRAM.*\(backends: UCX: DRAM, VRAM\)/,
          );
          expect(hint).toContain("UCX_TLS");
        }
      }
    });

    test.skipIf(posixMissing)(
      "POSIX, which has no device memory: the error names its memory types and the remedy",
      { timeout: 240_000 },
      async () => {
        for (const { code, message, hint } of await outcomes("POSIX")) {
          expect(code).toBe("KV_MEMORY_INVALID");
          expect(message).toMatch(/no backend of this agent registers VRAM.*\(POSIX: FILE, DRAM\)/);
          expect(hint).toContain("staged through host memory");
        }
      },
    );
  },
);
