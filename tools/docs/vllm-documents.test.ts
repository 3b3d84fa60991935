import { execFile } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { builtProgram } from "@kv/testing/node-programs";
import { describe, expect, test } from "vitest";

/** Runs the commands of docs/vllm-documents.md that take less than 10 s. */
const run = promisify(execFile);
const root = fileURLToPath(new URL("../../", import.meta.url));
const page = readFileSync(join(root, "docs/vllm-documents.md"), "utf8");

/** The number of rows of each document, and of what goes beyond them. */
const ROWS = { S1: 11, S2: 5, S3: 10, S4: 9, S5: 3, B: 11 };

/** The programs behind npm scripts. They are started without the set-up that the script begins with. */
const PROGRAMS: readonly string[] = ["demo", "kv-plan", "kv-nixl"];

interface Command {
  readonly text: string;
  /** The page gives a time for a command that takes 10 s or more. */
  readonly isLong: boolean;
}

interface VitestCommand extends Command {
  readonly file: string;
  /** Part of a test's full name; undefined runs the whole file. */
  readonly name: string | undefined;
}

const rows = page.split("\n").flatMap((line) => {
  const [, id = "", cells = ""] = /^\| ([SB]\d+(?:\.\d+)?) \|(.*)$/.exec(line) ?? [];
  const commands = Array.from(
    cells.matchAll(/`(np[mx] [^`]+)`( \(\d+ (?:s|min)\))?/g),
    ([, text = "", time]): Command => ({ text, isLong: time !== undefined }),
  );
  return id === "" ? [] : [{ id, commands }];
});
const commands = rows.flatMap((row) => row.commands);

const vitestCommands = commands.flatMap((command): VitestCommand[] => {
  const [, file, name] = /^npx vitest run (\S+)(?: -t "(.+)")?$/.exec(command.text) ?? [];
  return file === undefined ? [] : [{ ...command, file, name }];
});
const npmCommands = commands.filter(({ text }) => text.startsWith("npm "));

/** Arguments of a command line without quotes. */
function argumentsOf(text: string): { script: string; args: readonly string[] } {
  const [, script = "", rest = ""] = /^npm run (?:--silent )?(\S+)(?: -- (.*))?$/.exec(text) ?? [];
  return { script, args: rest.split(" ").filter(Boolean) };
}

test("the page has every row, each with a command of a known form", () => {
  const expected = Object.entries(ROWS).flatMap(([document, count]) =>
    Array.from({ length: count }, (_, i) => (document === "B" ? `B${i + 1}` : `${document}.${i + 1}`)),
  );
  expect(rows.map(({ id }) => id)).toEqual(expected);
  expect(rows.filter((row) => row.commands.length === 0)).toEqual([]);
  expect(vitestCommands.length + npmCommands.length).toBe(commands.length);
  expect(vitestCommands.filter(({ file }) => !existsSync(join(root, file)))).toEqual([]);
  const { scripts } = JSON.parse(readFileSync(join(root, "package.json"), "utf8")) as {
    scripts: Record<string, string>;
  };
  const used = npmCommands.map(({ text }) => argumentsOf(text).script);
  expect(used.filter((script) => scripts[script] === undefined)).toEqual([]);
});

interface Report {
  readonly testResults: readonly {
    readonly name: string;
    readonly assertionResults: readonly { readonly fullName: string; readonly status: string }[];
  }[];
}

test("each vitest command of less than 10 s passes at least one test", { timeout: 300_000 }, async () => {
  const short = vitestCommands.filter(({ isLong }) => !isLong);
  const named = short.filter(({ name }) => name !== undefined);
  const whole = short.filter(({ name }) => name === undefined);
  const found = new Map<string, Report["testResults"][number]["assertionResults"]>();
  // One run for all names, and one for all whole files: a process per command would take minutes.
  for (const [group, names] of [
    [named, ["-t", named.map(({ name = "" }) => escaped(name)).join("|")]],
    [whole, []],
  ] as const) {
    for (const [file, results] of await vitest([...new Set(group.map(({ file }) => file))], names))
      found.set(file, results);
  }
  const outcomes = short.map(({ file, name = "", text }) => {
    const matching = (found.get(file) ?? []).filter(({ fullName }) => fullName.includes(name));
    const failed = matching.filter(({ status }) => status === "failed");
    const passed = matching.filter(({ status }) => status === "passed");
    // A test that needs NIXL has its own report of being skipped.
    const isSkipped = matching.length > 0 && passed.length === 0;
    return { text, failed: failed.map(({ fullName }) => fullName), ran: passed.length > 0 || isSkipped };
  });
  expect(outcomes.filter(({ failed, ran }) => failed.length > 0 || !ran)).toEqual([]);
});

describe("commands of less than 10 s", () => {
  const short = npmCommands.filter(({ isLong }) => !isLong).map(({ text }) => text);
  test.each([...new Set(short)])("%s", { timeout: 60_000 }, async (text) => {
    const { script, args } = argumentsOf(text);
    if (!PROGRAMS.includes(script)) throw new Error(`no program is known for npm run ${script}`);
    const { stdout } = await run(process.execPath, [builtProgram(script), ...args], {
      cwd: root,
      maxBuffer: 2 ** 26,
    });
    expect(stdout).not.toBe("");
  });
});

/** Runs files, and returns the results of each. */
async function vitest(files: readonly string[], args: readonly string[]) {
  const folder = mkdtempSync(join(tmpdir(), "kv-documents-"));
  const report = join(folder, "report.json");
  try {
    const { VITEST: _, ...env } = process.env;
    const cli = join(root, "node_modules/vitest/vitest.mjs");
    await run(
      process.execPath,
      [cli, "run", ...files, ...args, "--reporter=json", `--outputFile.json=${report}`],
      { cwd: root, env, maxBuffer: 2 ** 26 },
    ).catch((error: unknown) => {
      // A failed test is in the report.
      if (!existsSync(report)) throw error;
    });
    const { testResults } = JSON.parse(readFileSync(report, "utf8")) as Report;
    return new Map(
      testResults.map(({ name, assertionResults }) => [
        name.slice(root.length),
        assertionResults.filter(({ fullName }) => fullName !== ""),
      ]),
    );
  } finally {
    rmSync(folder, { recursive: true });
  }
}

function escaped(text: string): string {
  return text.replaceAll(/[.*+?^${}()|[\]\\]/g, "\\$&");
}
