import { spawn } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { bundled } from "@kv/testing/node-programs";
import { beforeAll, describe, expect, test } from "vitest";
import { ChildProcess, failureText, runCommand, runInChild } from "../src/index.js";

const child = (name: string) =>
  bundled(fileURLToPath(new URL(`./children/${name}.ts`, import.meta.url)));
let module: string;
beforeAll(async () => {
  module = await child("task");
});

/** More than a process needs to start on a busy machine. */
const TIMEOUT_MS = 60_000;
const run = (
  mode: string,
  more: { timeoutMs?: number; startTimeoutMs?: number; request?: object } = {},
) => runInChild({ module, args: [mode], timeoutMs: TIMEOUT_MS, ...more });

/** The text of an outcome without a value. */
async function failure(mode: string, more = {}): Promise<string> {
  const outcome = await run(mode, more);
  if (outcome.kind === "answered") throw new Error(`answered ${String(outcome.value)}`);
  return `${outcome.kind}: ${failureText(outcome)}`;
}

describe("a task in a child process", () => {
  test("answers with its value", async () => {
    expect(await run("result")).toEqual({
      kind: "answered",
      value: { of: "the task" },
      output: "",
    });
    expect(await run("nothing")).toEqual({ kind: "answered", value: undefined, output: "" });
    const request = { long: "x".repeat(1 << 20) };
    expect(await run("request", { request })).toMatchObject({ kind: "answered", value: request });
  });

  test("answers with its error", async () => {
    const error = { code: "KV_MEMORY_INVALID", message: "no memory", hint: "add some" };
    expect(await run("error")).toEqual({ kind: "failed", error, output: "" });
    expect(await failure("error-of-node")).toBe(
      "failed: the task failed: not a KvError [KV_INTERNAL]",
    );
  });

  test.each([
    ["exit-1", "crashed: the process ended with exit code 1\nits output ended with:\ngives up"],
    ["exit-0", "crashed: the process ended with exit code 0"],
    ["SIGKILL", "crashed: the process ended with SIGKILL\nits output ended with:\nlast words"],
    ["SIGSEGV", "crashed: the process ended with SIGSEGV\nits output ended with:\nlast words"],
    [
      "result-and-crash",
      "crashed: the process ended with SIGSEGV\nits output ended with:\nlast words",
    ],
    ["result-and-exit-3", "crashed: the process ended with exit code 3"],
  ])("%s is a crash, with how it ended and its last words", async (mode, text) => {
    expect(await failure(mode)).toBe(text);
  });

  test.each([
    ["hang", "timeout: no answer within 1.5 s"],
    ["hang-in-a-call", "timeout: no end within 1.5 s"],
    ["hang-in-a-step", "timeout: no answer within 1.5 s, in the second step"],
    ["result-and-hang", "timeout: no end within 1.5 s"],
  ])("%s is killed at its limit", async (mode, text) => {
    const startTimeoutMs = mode === "hang" ? 1500 : TIMEOUT_MS;
    expect(await failure(mode, { timeoutMs: 1500, startTimeoutMs })).toBe(text);
  });

  test("a module that does not exist, and a program that cannot be started", async () => {
    const outcome = await runInChild({ module: "/nowhere.mjs", timeoutMs: TIMEOUT_MS });
    expect(outcome).toMatchObject({ kind: "crashed", how: "exit code 1" });
    expect(outcome.output).toContain("/nowhere.mjs");
    const { execPath } = process;
    process.execPath = "/nowhere/node";
    try {
      expect(await failure("result")).toBe(
        "crashed: the process ended with spawn /nowhere/node ENOENT",
      );
    } finally {
      process.execPath = execPath;
    }
  });

  test("the end of its output is kept, at most 1 Mi characters", async () => {
    const outcome = await run("floods");
    expect(outcome).toMatchObject({ kind: "answered", value: "flooded" });
    expect(outcome.output).toHaveLength(1 << 20);
    expect(outcome.output.endsWith("4949\n")).toBe(true);
  });
});

describe("a child process that serves", () => {
  const awaited = {
    what: "the server did not start",
    code: "KV_ENGINE_FAILED",
    timeoutMs: TIMEOUT_MS,
  } as const;

  test("answers in order, and ends when it is closed", async () => {
    const server = new ChildProcess({ module, args: ["serves"] });
    expect(await server.answer(awaited)).toBe("ready");
    for (const at of [1, 2]) server.send({ at });
    expect(await server.answer(awaited)).toEqual({ at: 1 });
    expect(await server.answer(awaited)).toEqual({ at: 2 });
    await server.close();
    expect(await server.ended).toBe("exit code 0");
    server.send({ at: 3 });
    await expect(server.answer(awaited)).rejects.toMatchObject({
      code: "KV_ENGINE_FAILED",
      message: "the server did not start: exit code 0",
    });
  });

  test.each([
    [
      "SIGSEGV",
      { message: "the server did not start: SIGSEGV", details: { output: ["last words"] } },
    ],
    [
      "exit-1",
      { message: "the server did not start: exit code 1", details: { output: ["gives up"] } },
    ],
    ["error", { code: "KV_MEMORY_INVALID", message: "p0: no memory", hint: "add some" }],
  ])("%s in place of an answer is an error", async (mode, error) => {
    const server = new ChildProcess({ module, args: [mode] });
    await expect(server.answer({ ...awaited, prefix: "p0: " })).rejects.toMatchObject(error);
    await server.ended;
  });

  test("a child that does not answer in time is killed", async () => {
    const server = new ChildProcess({ module, args: ["hang"] });
    await expect(server.answer({ ...awaited, timeoutMs: 1000 })).rejects.toMatchObject({
      message: "the server did not start: no answer within 1 s",
    });
    expect(await server.ended).toBe("SIGKILL");
  });

  test.each(["serves", "hang-in-a-call"])("%s: it ends when its owner is killed", async (mode) => {
    const owner = spawn(process.execPath, [await child("owner"), module, mode], {
      stdio: ["ignore", "pipe", "inherit"],
    });
    const [line] = (await once(owner.stdout, "data")) as [Buffer];
    const pid = Number(String(line));
    const runs = () => {
      try {
        return process.kill(pid, 0);
      } catch {
        return false;
      }
    };
    expect(runs()).toBe(true);
    owner.kill("SIGKILL");
    await expect.poll(runs).toBe(false);
  });
});

describe("a command", () => {
  test("its end, its output, and its lines as they come", async () => {
    const lines: string[] = [];
    const onLine = (line: string) => lines.push(line);
    const script = "printf 'one\\n\\ntwo'; echo three >&2; exit 4";
    expect(await runCommand("sh", ["-c", script], { onLine })).toEqual({
      exitCode: 4,
      how: "exit code 4",
      isFound: true,
      stdout: "one\n\ntwo",
      stderr: "three\n",
    });
    expect(lines.sort()).toEqual(["one", "three", "two"]);
    expect(await runCommand("sh", ["-c", "kill -SEGV $$"])).toMatchObject({
      exitCode: undefined,
      how: "SIGSEGV",
    });
  });

  test("one that does not exist, one that does not end, and one whose child holds its output", async () => {
    expect(await runCommand("no-such-program", [])).toMatchObject({
      exitCode: undefined,
      isFound: false,
      how: "spawn no-such-program ENOENT",
    });
    expect(await runCommand("sleep", ["60"], { timeoutMs: 500 })).toMatchObject({
      exitCode: undefined,
      isFound: true,
      how: "no end within 0.5 s",
    });
    const startedMs = performance.now();
    expect(await runCommand("sh", ["-c", "sleep 60 & echo $!"])).toMatchObject({ exitCode: 0 });
    expect(performance.now() - startedMs).toBeLessThan(30_000);
  });
});
