import { execFile, spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { promisify } from "node:util";
import { builtProgram } from "@kv/testing/node-programs";
import { describe, expect, test } from "vitest";
import { readManifest } from "../release/packages.js";
import { readPages, root } from "../site/pages.js";

/** The commands of the pages that a reader follows. A page says what a command needs; those that need nothing are run here. */
const PROGRAMS: readonly string[] = ["kv-neuron", "kv-nixl", "kv-peer", "kv-plan", "kv-proxy", "demo"];
/** All pages but the reports of measurements and designs. */
const GUIDES = /^docs\/(?!bench\/|design\/)/;

interface Command {
  readonly page: string;
  readonly line: string;
  readonly needs: string | undefined;
}

const { pages } = readPages();
const commands = pages.flatMap(({ source, text }): Command[] =>
  [...text.matchAll(/(?:^_(Needs [^\n]*)_\n\n)?^```sh\n([\s\S]*?)^```$/gm)].flatMap(([, needs, block = ""]) =>
    block
      .replaceAll(/\\\n\s*/g, "")
      .split("\n")
      .map((line) => line.replace(/\s+#.*$/, "").trim())
      .filter((line) => line !== "" && !line.startsWith("#"))
      .map((line) => ({ page: source, line, needs })),
  ),
);

/** The program of a command line and its arguments; undefined for a program of others. */
function ours(line: string): { program: string; args: readonly string[] } | undefined {
  const words = [...line.matchAll(/'[^']*'|"[^"]*"|\S+/g)].map(([word]) => word.replace(/^['"]|['"]$/g, ""));
  const at = words.findIndex((word, i) =>
    word === "--no-install" ? words[i - 1] === "npx" : word === "run" && words[i - 1] === "npm",
  );
  if (at < 0) return undefined;
  const [program = "", ...args] = words.slice(at + 1).filter((word) => word !== "--silent");
  return { program, args: args[0] === "--" ? args.slice(1) : args };
}

const execute = promisify(execFile);
const helps = new Map<string, Promise<string>>();
/** What `--help` prints of a program, or of the subcommand that the arguments name. */
function helpOf(program: string, [first = ""]: readonly string[]): Promise<string> {
  const subcommand = /^[a-z]+$/.test(first) ? [first] : [];
  const key = [program, ...subcommand].join(" ");
  const asked =
    helps.get(key) ??
    execute(process.execPath, [builtProgram(program), ...subcommand, "--help"], { cwd: root }).then(
      ({ stdout }) => stdout,
    );
  helps.set(key, asked);
  return asked;
}

/** What is wrong with a command line of a page. */
async function problemsOf({ page, line }: Command): Promise<string[]> {
  const { scripts = {} } = readManifest(root) as { scripts?: Record<string, string> };
  const found = ours(line);
  if (found === undefined) return [];
  const { program, args } = found;
  if (!PROGRAMS.includes(program))
    return scripts[program] === undefined ? [`${page}: ${line}: no ${program}`] : [];
  const help = await helpOf(program, args);
  return args
    .filter((arg) => /^--[a-z]/.test(arg))
    .map((arg) => arg.replace(/=.*/, ""))
    .filter((flag) => !["--help", "--version"].includes(flag) && !new RegExp(`${flag}(?![\\w-])`).test(help))
    .map((flag) => `${page}: ${line}: no ${flag}`);
}

test("every program, script and option of the pages exists", { timeout: 240_000 }, async () => {
  expect(commands.length).toBeGreaterThan(60);
  expect((await Promise.all(commands.map(problemsOf))).flat()).toEqual([]);
});

const free = commands.filter(({ page, needs }) => GUIDES.test(page) && needs === undefined);

test("the guides have commands that run anywhere", () => {
  expect(free.length).toBeGreaterThan(8);
});

describe("a command of the guides that needs nothing", () => {
  test.each(free)("$page: $line", { timeout: 120_000 }, ({ line }) => {
    const { program, args } = ours(line) ?? { program: "", args: [] };
    if (!PROGRAMS.includes(program)) return expect.fail(`${line} is no program of ours: say what it needs`);
    const { status, stdout, stderr } = spawnSync(process.execPath, [builtProgram(program), ...args], {
      cwd: root,
      encoding: "utf8",
    });
    expect(status, stderr).toBe(0);
    expect(stdout).not.toBe("");
  });
});

test("each command of the guides that needs something is marked right above it", () => {
  for (const { source } of pages.filter((page) => GUIDES.test(page.source))) {
    const text = readFileSync(join(root, source), "utf8");
    const marks = text.match(/^_Needs .*_$/gm) ?? [];
    const used = commands.filter(({ page, needs }) => page === source && needs !== undefined);
    expect(new Set(used.map(({ needs }) => needs)).size, source).toBe(new Set(marks).size);
  }
});
