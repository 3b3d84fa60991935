import { execFile } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { promisify } from "node:util";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test } from "vitest";
import { root } from "../repository/source-files.js";
import { readPages } from "../site/pages.js";
import { pageCommands } from "./page-commands.js";

/**
 * Runs the files of `examples/` in this checkout. `npm run release:rehearse` runs them where the
 * packages are installed.
 */
const run = promisify(execFile);
const programs = readdirSync(join(root, "examples")).filter(
  (name) => /\.[cm]js$/.test(name) && name !== "engine.mjs",
);
const commands = pageCommands(readPages().pages);

describe.each(programs)("%s", (name) => {
  const line = `node examples/${name}`;
  const missing = /@kv\/nixl/.test(readFileSync(join(root, "examples", name), "utf8"))
    ? nixlMissing
    : undefined;

  test.skipIf(missing)(`prints what its page shows (${missing ?? "found"})`, async () => {
    const shown = commands.find((command) => command.line === line)?.shows;
    expect(shown, `a page with \`${line}\` and its output`).toBeDefined();
    const { stdout } = await run(process.execPath, [join(root, "examples", name)], { cwd: root });
    expect(stdout.trim().split("\n").sort()).toEqual([...(shown ?? [])].sort());
  });
});
