// A long suite: starts each command of a page; npm test checks the tests that the page names.
import { execFile } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { builtProgram } from "@kv/testing/node-programs";
import { describe, expect, test } from "vitest";
import { rows, vitestCommands } from "./vllm-documents.mjs";

/**
 * Runs the npm commands of docs/vllm-documents.md that take less than 10 s. `npm test` checks the
 * vitest commands with its own report.
 */
const run = promisify(execFile);
const root = fileURLToPath(new URL("../../", import.meta.url));

/** The number of rows of each document. */
const ROWS = { S1: 11, S2: 6, S3: 11, S4: 10, S5: 3 };

/**
 * The programs behind npm scripts. They are started without the set-up that the script begins with.
 */
const PROGRAMS: readonly string[] = ["demo", "kv-plan"];

const commands = rows().flatMap((row) => row.commands);
const npmCommands = commands.filter(({ text }) => text.startsWith("npm "));

/** Arguments of a command line without quotes. */
function argumentsOf(text: string): { script: string; args: readonly string[] } {
  const [, script = "", rest = ""] = /^npm run (?:--silent )?(\S+)(?: -- (.*))?$/.exec(text) ?? [];
  return { script, args: rest.split(" ").filter(Boolean) };
}

test("the page has every row, each with a command of a known form", () => {
  const expected = Object.entries(ROWS).flatMap(([document, count]) =>
    Array.from({ length: count }, (_, i) => `${document}.${i + 1}`),
  );
  expect(rows().map(({ id }) => id)).toEqual(expected);
  expect(rows().filter((row) => row.commands.length === 0)).toEqual([]);
  expect(vitestCommands().length + npmCommands.length).toBe(commands.length);
  expect(vitestCommands().filter(({ file }) => !existsSync(join(root, file)))).toEqual([]);
  const { scripts } = JSON.parse(readFileSync(join(root, "package.json"), "utf8")) as {
    scripts: Record<string, string>;
  };
  const used = npmCommands.map(({ text }) => argumentsOf(text).script);
  expect(used.filter((script) => scripts[script] === undefined)).toEqual([]);
});

describe("commands of less than 10 s", () => {
  const short = npmCommands.filter(({ isLong }) => !isLong);
  test.each(short)("$text", { timeout: 60_000 }, async ({ text, shows }) => {
    const { script, args } = argumentsOf(text);
    if (!PROGRAMS.includes(script)) throw new Error(`no program is known for npm run ${script}`);
    const { stdout } = await run(process.execPath, [builtProgram(script), ...args], {
      cwd: root,
      maxBuffer: 2 ** 26,
    });
    expect(shows).not.toEqual([]);
    // Columns have as many blanks as they need.
    const output = stdout.replace(/ +/g, " ");
    for (const each of shows) expect(output).toContain(each);
  });
});
