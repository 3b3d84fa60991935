// Of `npm run test:versions`. A machine may need several runs to show a race, so CI leaves it out.
import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import { join } from "node:path";
import { text } from "node:stream/consumers";
import { findLibrary } from "@kv/nixl";
import { expect, test } from "vitest";
import { REPAIRS } from "../../packages/nixl/src/addon/repairs.js";
import { PreloadFinder } from "../../packages/nixl/src/backends/plugins.js";
import { DEFAULT_VERSION } from "../../packages/nixl/src/install/wheels.js";
import { libfabricMissing } from "../../packages/nixl/test/support/libfabric-available.js";
import { pythonWith } from "../setup/user-cache.mjs";

const PROGRAMS = join(import.meta.dirname, "../../native/upstream");

// A program that finds no fault says that its repair can go.
for (const repair of Object.keys(REPAIRS)) {
  test.skipIf(libfabricMissing)(
    `the library has the fault that ${repair} repairs (${libfabricMissing ?? "found"})`,
    { timeout: 300_000 },
    async ({ signal }) => {
      const python = await pythonWith(`bench-venv-${DEFAULT_VERSION}`, [
        ["numpy"],
        ["--no-deps", `nixl-cu12==${DEFAULT_VERSION}`],
      ]);
      const { libraries, variables } = await new PreloadFinder().find(
        "LIBFABRIC",
        await findLibrary(),
        process.env,
      );
      const program = join(PROGRAMS, `${repair.replaceAll("-", "_")}.py`);
      const args = repair.startsWith("libfabric") ? libraries : [];
      const child = spawn(join(python, "python"), [program, ...args], {
        env: Object.assign({ ...process.env }, Object.fromEntries(variables)),
        stdio: ["ignore", "pipe", "ignore"],
        detached: true,
      });
      // With what it has started: a call that does not return takes a core for ever.
      const endGroup = () => spawnSync("kill", ["-KILL", "--", `-${child.pid}`]);
      signal.addEventListener("abort", endGroup);
      const [said, [code]] = await Promise.all([text(child.stdout), once(child, "close")]);
      endGroup();
      expect({ said, code }).toEqual({ said: expect.stringMatching(/^fault: /), code: 1 });
    },
  );
}
