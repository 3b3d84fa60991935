// A long suite: starts each command of the guides; the programs have suites of their own.
import { execFile, execFileSync, spawnSync } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { promisify } from "node:util";
import { builtProgram } from "@kv/testing/node-programs";
import { describe, expect, test } from "vitest";
import { readManifest } from "../release/packages.js";
import { root } from "../repository/source-files.js";
import { readPages } from "../site/pages.js";
import { codeOf, nodeArguments, PROGRAMS, pageCommands, wordsOf } from "./page-commands.js";

/** All pages but the reports of measurements and designs. */
const GUIDES = /^docs\/(?!bench\/|design\/)/;

const { pages } = readPages();
const commands = pageCommands(pages);

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

const { scripts = {} } = readManifest(root) as { scripts?: Record<string, string> };
const tracked = execFileSync("git", ["ls-files"], { cwd: root, encoding: "utf8" })
  .trim()
  .split("\n");

/**
 * The source of a script of package.json: its file, and the folder of the bench or tool that the
 * file starts.
 */
function sourceOf(script: string): string {
  const read = (path: string) => readFileSync(join(root, path), "utf8");
  const own =
    (scripts[script] ?? "")
      .match(/[\w./-]+\.(?:mjs|ts)/g)
      ?.map(read)
      .join("\n") ?? "";
  const folders = new Set((scripts[script] + own).match(/\b(?:bench|tools\/[\w-]+)(?=\/)/g));
  const files = tracked.filter(
    (path) =>
      /\.(ts|mjs|json)$/.test(path) && [...folders].some((one) => path.startsWith(`${one}/`)),
  );
  return own + files.map(read).join("\n");
}

/** What is wrong with a command of `npm run`: its script, a flag, or a part that `--only` names. */
function scriptProblems([script = "", ...args]: readonly string[]): string[] {
  if (scripts[script] === undefined) return [`no ${script}`];
  const flags = args
    .filter((arg) => /^--[a-z]/.test(arg))
    .map((arg) => arg.replace(/^--|=.*/g, ""));
  const at = args.indexOf("--only");
  const parts = (at < 0 ? "" : (args[at + 1] ?? ""))
    .split(",")
    .filter((part) => /^[a-z]/.test(part));
  if (flags.length + parts.length === 0) return [];
  const source = sourceOf(script);
  return [...flags, ...parts]
    .filter((word) => !new RegExp(`(?<!\\w|\\w-)${word}(?![\\w-])`).test(source))
    .map((word) => `no ${word}`);
}

/**
 * What is wrong with a command line: a program, subcommand, script, file or flag that does not
 * exist.
 */
async function problemsOf(line: string): Promise<string[]> {
  const { runner, words } = wordsOf(line);
  const [program = "", ...args] = words;
  if (PROGRAMS.includes(program)) {
    const help = await helpOf(program, args);
    // A program prints its own help for a subcommand that it lacks. selftest is one of the
    // checkout.
    const isNone = /^[a-z]+$/.test(args[0] ?? "") && help === (await helpOf(program, []));
    if (isNone && !(runner === "npm" && sourceOf(program).includes(`"${args[0]}"`)))
      return [`no subcommand ${args[0]}`];
    return args
      .filter((arg) => /^--[a-z]/.test(arg))
      .map((arg) => arg.replace(/=.*/, ""))
      .filter(
        (flag) =>
          !["--help", "--version"].includes(flag) && !new RegExp(`${flag}(?![\\w-])`).test(help),
      )
      .map((flag) => `no ${flag}`);
  }
  if (runner === "npm") return scriptProblems(words);
  if (program === "vitest" && runner === "npx")
    return args
      .filter((arg) => /^[a-z]+\//.test(arg) && !tracked.some((path) => path.includes(arg)))
      .map((arg) => `no ${arg}`);
  if (runner === "npx")
    return existsSync(join(root, "node_modules/.bin", program)) ? [] : [`no ${program}`];
  const [path = ""] =
    program === "node"
      ? args.filter((arg) => /^(bench|examples|native|scripts|tools)\//.test(arg))
      : [];
  return path === "" || tracked.includes(path) ? [] : [`no ${path}`];
}

const COMMAND = new RegExp(`^(?:npm run|npx|node|${PROGRAMS.join("|")}) [^…<]*$`);
/** Commands of other programs, and of a project of the reader's. */
const OTHERS = /^npx (?:tsx|pnpm|changeset|stryker)\b/;

test("every program, subcommand, script, file and option of the pages' commands exists", {
  timeout: 240_000,
}, async () => {
  const inText = pages.flatMap(({ source, text }) =>
    codeOf(text)
      .filter((code) => COMMAND.test(code) && !OTHERS.test(code))
      .map((line) => ({ page: source, line })),
  );
  expect(commands.length).toBeGreaterThan(60);
  expect(inText.length).toBeGreaterThan(200);
  const found = [...commands, ...inText].map(async ({ page, line }) =>
    (await problemsOf(line)).map((problem) => `${page}: ${line}: ${problem}`),
  );
  expect((await Promise.all(found)).flat()).toEqual([]);
});

test.each([
  ["kv-peer load", "no subcommand load"],
  ["npx --no-install kv-peer watch --nothing", "no --nothing"],
  ["npm run nothing", "no nothing"],
  ["npm run test:long -- --only whole,no-such-kind", "no no-such-kind"],
  ["npx vitest run packages/nothing", "no packages/nothing"],
  ["npx nothing", "no nothing"],
  ["node scripts/nothing.mjs", "no scripts/nothing.mjs"],
])("a page with `%s` is wrong: %s", async (line, problem) => {
  expect(COMMAND.test(line)).toBe(true);
  expect(await problemsOf(line)).toEqual([problem]);
});

/** Flags of others that the pages name. */
const FLAGS_OF_OTHERS: Readonly<Record<string, readonly string[]>> = {
  npm: ["--silent", "--no-install", "--ignore-scripts"],
  node: [
    "--cpu-prof",
    "--expose-gc",
    "--import",
    "--max-semi-space-size",
    "--no-memory-reducer",
    "--permission",
    "--allow-addons",
    "--allow-fs-read",
    "--allow-child-process",
    "--experimental-permission",
    "--experimental-require-module",
  ],
  vitest: ["--inspect-brk", "--no-file-parallelism", "--max"],
  next: ["--webpack"],
  docker: ["--ulimit"],
  kubectl: ["--from-literal"],
  "vllm serve and vllm bench": [
    "--dataset-name",
    "--tensor-parallel-size",
    "--disable-log-stats",
    "--enable-scale-out",
    "--api-key",
    "--kv-events-config",
    "--gpu-memory-utilization",
  ],
  "llm-d's sidecar": [
    "--kv-connector",
    "--tls-insecure-skip-verify",
    "--enable-ssrf-protection",
    "--inference-pool",
    "--prefill-max-retries",
    "--enable-prefiller-sampling",
  ],
};

test("every flag that a sentence names is one of ours, or is listed with whose it is", async () => {
  const named = new Map<string, string>();
  for (const { source, text } of pages)
    for (const [flag] of codeOf(text)
      .join("\n")
      .matchAll(/(?<![\w-])--[a-z][a-z0-9-]*/g))
      named.set(flag, source);
  expect(named.size).toBeGreaterThan(200);
  const own = await Promise.all(
    PROGRAMS.map(async (program) => {
      const help = await helpOf(program, []);
      const subcommands = Array.from(help.matchAll(/^ {2}([a-z]+)\b/gm), ([, name = ""]) => name);
      const known = subcommands.filter((name) => name !== "help");
      return [help, ...(await Promise.all(known.map((name) => helpOf(program, [name]))))].join(
        "\n",
      );
    }),
  );
  const sources = Object.keys(scripts).map(sourceOf).join("\n");
  const isOurs = (flag: string) =>
    new RegExp(`${flag}(?![\\w-])`).test(own.join("\n")) ||
    new RegExp(`\\b${flag.slice(2)}\\b`).test(sources);
  const others = Object.values(FLAGS_OF_OTHERS).flat();
  const unknown = [...named].filter(([flag]) => !others.includes(flag) && !isOurs(flag));
  expect(unknown).toEqual([]);
  expect(others.filter((flag) => !named.has(flag))).toEqual([]);
});

/**
 * A page says what a command needs; those that need nothing are run here. outputs.test.ts runs the
 * examples.
 */
const free = commands.filter(
  ({ page, needs, line }) =>
    GUIDES.test(page) && needs === undefined && !/^node examples\//.test(line),
);

test("the guides have commands that run anywhere", () => {
  expect(free.length).toBeGreaterThan(8);
});

describe("a command of the guides that needs nothing", () => {
  test.each(free)("$page: $line", { timeout: 120_000 }, ({ line }) => {
    const args = nodeArguments(line);
    if (args === undefined) return expect.fail(`${line} is no program of ours: say what it needs`);
    const { status, stdout, stderr } = spawnSync(
      process.execPath,
      args,
      // A server that a page starts would never end.
      { cwd: root, encoding: "utf8", timeout: 90_000 },
    );
    expect(status, stderr).toBe(0);
    expect(stdout).not.toBe("");
  });
});

test("each command of the guides that needs something is marked right above it", () => {
  for (const { source } of pages.filter((page) => GUIDES.test(page.source))) {
    const text = readFileSync(join(root, source), "utf8");
    const marks = text.match(/^_Needs (?:.|\n(?!\n))*?_$/gm) ?? [];
    const used = commands.filter(({ page, needs }) => page === source && needs !== undefined);
    expect(new Set(used.map(({ needs }) => needs)).size, source).toBe(new Set(marks).size);
  }
});
