// A long suite: starts every program with each kind of wrong call.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { runCommand } from "@kv/program";
import { type FakeUpstream, startUpstream } from "@kv/testing/http/fake-upstream";
import { isLongRun, someOf } from "@kv/testing/long-run";
import { builtProgram } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { afterAll, beforeAll, describe, expect, it, onTestFinished } from "vitest";

const root = join(import.meta.dirname, "../..");

interface Program {
  readonly name: string;
  readonly folder: string;
  /** A call that ends with a `KvError`; undefined where none does. */
  readonly wrong?: string;
  /** What is typed after its name, and what bash completes. */
  readonly completed: readonly [typed: string, found: string];
}

const PROGRAMS: readonly Program[] = [
  {
    name: "kv-plan",
    folder: "kv-plan",
    wrong: "--config /nowhere",
    completed: ["--poo", "--pool"],
  },
  {
    name: "kv-peer",
    folder: "peer",
    wrong: "diff /nowhere /nowhere",
    completed: ["doctor --prefi", "--prefill"],
  },
  {
    name: "kv-proxy",
    folder: "proxy",
    wrong: "--prefill p:1",
    completed: ["--prefi", "--prefill"],
  },
  {
    name: "kv-epp",
    folder: "epp",
    wrong: "--prefill p:1",
    completed: ["--prefi", "--prefill"],
  },
  {
    name: "kv-nixl",
    folder: "nixl",
    wrong: "bench --connect 127.0.0.1:1",
    completed: ["bench --conn", "--connect"],
  },
  { name: "kv-neuron", folder: "neuron", completed: ["doc", "doctor"] },
  {
    name: "kv-pool",
    folder: "pool",
    wrong: "serve --port 0",
    completed: ["serve --mem", "--memory"],
  },
];

/**
 * Prints what bash completes for the words of a command line. The function that the script calls is
 * part of the package bash-completion.
 */
const COMPLETE = `
  source <("$1" complete bash)
  _get_comp_words_by_ref() { words=("\${COMP_WORDS[@]}"); cur=\${COMP_WORDS[COMP_CWORD]}; }
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
  "__\${1//-/_}_complete"
  printf '%s\\n' "\${COMPREPLY[@]}"`;

/** Commands that commander and the completion add. */
const OTHERS: readonly string[] = ["help", "complete"];
const DEMO = join(root, "tools/setup/demo.mjs");

async function output(command: string, args: readonly string[], env: NodeJS.ProcessEnv = {}) {
  const ended = await runCommand(command, args, { env: { ...process.env, ...env } });
  return { code: ended.exitCode, stdout: ended.stdout, stderr: ended.stderr };
}

const run = ({ name }: Pick<Program, "name">, args: string) =>
  output(process.execPath, [builtProgram(name), ...args.split(" ")]);

async function expectFullDisk(program: string, call: string): Promise<void> {
  const full = `${process.execPath} ${call} > /dev/full`;
  const { code, stderr } = await output("bash", ["-c", full]);
  expect(code).toBe(2);
  const message = `^${program}: stdout cannot be written: .*ENOSPC.* \\[KV_CONFIG_INVALID\\]\n$`;
  expect(stderr).toMatch(new RegExp(message));
}

const versionIn = (folder: string) =>
  (JSON.parse(readFileSync(join(root, folder, "package.json"), "utf8")) as { version: string })
    .version;

describe.each(PROGRAMS)("$name", (program) => {
  const { name, folder, wrong, completed } = program;

  it("prints its version and its help on stdout, and exits with 0", async () => {
    const shown = await run(program, "--version");
    const help = await run(program, "--help");
    const version = versionIn(`packages/${folder}`);
    expect(shown).toEqual({ code: 0, stdout: `${version}\n`, stderr: "" });
    expect(help).toMatchObject({ code: 0, stderr: "" });
    expect(help.stdout).toContain(`Usage: ${name}`);
    // NO_COLOR holds: there are no colours.
    expect(help.stdout).not.toContain("\u001b");
    expect(await run(program, "help")).toEqual(help);
  });

  it("first-contact.md: a full disk is an error, with exit code 2", () =>
    expectFullDisk(name, `${builtProgram(name)} --help`));

  it("has a help of 100 columns at most for each command", async () => {
    const top = (await run(program, "--help")).stdout;
    const [, commands = ""] = top.split("\nCommands:\n");
    const names = [...commands.matchAll(/^ {2}([a-z]+) /gm)].map(([, command = ""]) => command);
    const own = names.filter((command) => !OTHERS.includes(command));
    const helps = await Promise.all(own.map((command) => run(program, `${command} --help`)));
    for (const help of [top, ...helps.map(({ stdout }) => stdout)]) {
      expect(help.split("\n").filter((line) => line.length > 100)).toEqual([]);
      expect(help).not.toMatch(/default: (\[\]|undefined|null)/);
    }
  });

  it.runIf(isLongRun || name === "kv-plan")(
    "is what npm run starts in a checkout",
    { timeout: 120_000 },
    async () => {
      // The set-up before it reports on stderr.
      const cli = [join(root, "tools/setup/cli.mjs"), folder, "--version"];
      const { code, stdout } = await output(process.execPath, cli);
      expect(code).toBe(0);
      expect(stdout).toMatch(/^\d+\.\d+\.\d+\n$/);
    },
  );

  it.each(someOf(["bash", "zsh", "fish"], 3))("prints its completion for %s", async (shell) => {
    const { code, stdout, stderr } = await run(program, `complete ${shell}`);
    expect({ code, stderr }).toEqual({ code: 0, stderr: "" });
    expect(stdout).toContain(`${shell} completion for ${name}`);
    expect(stdout).toContain(`${name} complete --`);
  });

  it("exits with 2 for a wrong call, and prints nothing on stdout", async () => {
    const { code, stdout, stderr } = await run(program, "--no-such-option");
    expect({ code, stdout }).toEqual({ code: 2, stdout: "" });
    expect(stderr).toMatch(
      new RegExp(
        `^${name}: unknown option '--no-such-option' \\[KV_CONFIG_INVALID\\]\n( {2}.+\n)?$`,
      ),
    );
  });

  it.runIf(isLongRun || name === "kv-peer")("bash completes its options", async () => {
    const folder = scratchFolder(onTestFinished);
    // The program under its name on PATH.
    const call = `${process.execPath} ${builtProgram(name)}`;
    writeFileSync(join(folder, name), `#!/bin/sh\nexec ${call} "$@"\n`, { mode: 0o755 });
    const [typed, found] = completed;
    const args = ["-c", COMPLETE, "bash", name, ...typed.split(" ")];
    const { stdout } = await output("bash", args, { PATH: `${folder}:${process.env["PATH"]}` });
    expect(stdout.trim().split("\n")).toContain(found);
  });

  if (wrong === undefined) return;
  it("prints an error with its code, and exits with 2", async () => {
    const { code, stdout, stderr } = await run(program, wrong);
    expect({ code, stdout }).toEqual({ code: 2, stdout: "" });
    expect(stderr).toMatch(new RegExp(`^${name}: .+ \\[KV_[A-Z_]+\\]\\n( {2}.+\\n)?$`));
  });
});

it("the demo prints its version, its help before any set-up, and exits with 2 for a wrong call", async () => {
  const demo = (...args: string[]) => output(process.execPath, [DEMO, ...args]);
  const version = versionIn("apps/demo");
  expect(await demo("--version")).toEqual({ code: 0, stdout: `${version}\n`, stderr: "" });
  expect(await demo("--help")).toMatchObject({ code: 0, stderr: "" });
  expect(await demo("help")).toEqual(await demo("--help"));
  expect(await demo("help", "accuracy")).toEqual(await demo("accuracy", "--help"));
  const wrong = await demo("--no-such-option");
  expect(wrong).toMatchObject({ code: 2, stdout: "" });
  expect(wrong.stderr).toContain("kv-demo: unknown option '--no-such-option'");
});

it("a reader that goes away ends kv-plan quietly", async () => {
  const call = `node ${builtProgram("kv-plan")} --tp 8 --tp 8 --html --config`;
  const model = join(root, "packages/kv-plan/models/llama-3.1-70b.json");
  const pipe = `set -o pipefail; ${call} ${model} | head -1`;
  const { code, stdout, stderr } = await output("bash", ["-c", pipe]);
  expect({ code, stdout, stderr }).toEqual({ code: 0, stdout: "<!doctype html>\n", stderr: "" });
});

describe("Ctrl-C ends a program that waits for a server without an answer", () => {
  let server: FakeUpstream;
  beforeAll(async () => {
    // Health is told, and nothing else is ever answered.
    server = await startUpstream(({ path, response }) => {
      if (path === "/health") response.end("{}");
    });
  });
  afterAll(() => server.close());

  it.each([
    [
      "kv-proxy, with a request in flight",
      "--prefill URL --decode URL --port 0 --grace-ms 600000 --pairing off",
    ],
    ["kv-peer watch", "watch --pair http://URL"],
    ["kv-peer decode", "decode --prefill http://URL --duration 10m"],
  ])("%s", async (name, args) => {
    const [program = ""] = name.split(/[ ,]/);
    const words = args.replaceAll("URL", new URL(server.url).host).split(" ");
    const isAsked = () => server.seen.slice(before).some(({ path }) => path !== "/health");
    const before = server.seen.length;
    const child = spawn(process.execPath, [builtProgram(program), ...words], {
      cwd: root,
      stdio: ["ignore", "pipe", "inherit"],
    });
    const exited = once(child, "exit");
    if (name.startsWith("kv-proxy")) {
      const [line] = (await once(child.stdout, "data")) as [Buffer];
      const [proxy = ""] = /http:\S+/.exec(String(line)) ?? [];
      const body = JSON.stringify({ model: "m", prompt: "a", max_tokens: 1 });
      const headers = { "content-type": "application/json" };
      fetch(`${proxy}/v1/completions`, { method: "POST", headers, body }).catch(() => {});
    }
    await expect.poll(isAsked).toBe(true);
    child.kill("SIGINT");
    const [code, signal] = await exited;
    expect(signal).toBeNull();
    expect([0, 130]).toContain(code);
  });
});

it.each(["--help", "--version"])(
  "first-contact.md: a full disk is an error of `npm run demo -- %s` too",
  (flag) => expectFullDisk("kv-demo", `${DEMO} ${flag}`),
);
