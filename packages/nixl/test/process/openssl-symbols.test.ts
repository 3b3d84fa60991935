import { readdirSync, readFileSync, realpathSync } from "node:fs";
import { basename, join } from "node:path";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, onTestFinished, test } from "vitest";
import { pluginMissing } from "../support/plugins.js";
import { runChild } from "../support/run-child.js";

const objMissing = await pluginMissing("OBJ");
/**
 * A line of the loader: which file asks for a symbol of OpenSSL, and which file it gets it from.
 */
const BINDING = /binding file (\S+) \[\d+\] to (\S+) \[\d+\]: normal symbol `[^']+' \[OPENSSL_/;
const SYSTEM = /^lib(ssl|crypto)\.so\.3$/;

// Structures of one OpenSSL must not reach another one. Node's executable exports its own, and
// comes first for the loader.
describe.skipIf(nixlMissing)(`OpenSSL in the process (${nixlMissing ?? "found"})`, () => {
  test("NIXL's libraries take every symbol of OpenSSL from one place", {
    timeout: 120_000,
  }, async () => {
    const folder = scratchFolder(onTestFinished);
    const env = { LD_BIND_NOW: "1", LD_DEBUG: "bindings", LD_DEBUG_OUTPUT: join(folder, "of") };
    const end = await runChild("openssl-symbols.ts", objMissing === undefined ? ["OBJ"] : [], {
      env,
    });
    expect(end, end.stderr).toMatchObject({ code: 0, stdout: "loaded" });
    const sources = new Map<string, Set<string>>();
    for (const name of readdirSync(folder)) {
      for (const line of readFileSync(join(folder, name), "latin1").split("\n")) {
        const [, from = "", to = ""] = BINDING.exec(line) ?? [];
        if (from === "" || SYSTEM.test(basename(from))) continue;
        const found = sources.get(basename(from)) ?? new Set();
        sources.set(basename(from), found.add(to));
      }
    }
    const names = [...sources.keys()];
    for (const library of ["libgrpc", ...(objMissing === undefined ? ["libcurl", "libs2n"] : [])]) {
      expect(names.filter((name) => name.startsWith(library))).toHaveLength(1);
    }
    // A Node that is linked to the system's OpenSSL exports none, and then the system's is the only
    // one.
    const places = new Set([...sources.values()].flatMap((found) => [...found]));
    const own = [...places].every((path) => realpathSync(path) === realpathSync(process.execPath));
    const system = [...places].every((path) => SYSTEM.test(basename(path)));
    expect([own, system], [...places].join(", ")).toContain(true);
  });
});
