// A long suite: ends the demo at many moments.
import { type ChildProcess, spawn } from "node:child_process";
import { randomUUID } from "node:crypto";
import { readdirSync, readFileSync, readlinkSync, realpathSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { isLongRun, someOf } from "@kv/testing/long-run";
import { builtProgram } from "@kv/testing/node-programs";
import { afterEach, expect, it } from "vitest";
import { nixlAbsence } from "./support/nixl-absence.js";
import { startDemo } from "./support/run-demo.js";

const scripts = new URL("../../../tools/setup/end-with-npm.mjs", import.meta.url);
const MARK = "KV_TEST_TREE";
const trees: string[] = [];
afterEach(() => {
  for (const mark of trees.splice(0)) for (const pid of marked(mark)) process.kill(pid, "SIGKILL");
});

/**
 * What `npm run` starts: a shell that runs the wrapper, which runs the program. All processes of it
 * have the mark in their environment.
 */
function startTree(mark: string, args: readonly string[]): ChildProcess {
  trees.push(mark);
  const wrapper = `import { endWithNpm, runProgram } from "${scripts}";
    endWithNpm();
    runProgram("${builtProgram("demo")}", ${JSON.stringify(args)});`;
  // With the second command, the shell waits for the wrapper.
  return spawn("sh", ["-c", '"$0" --input-type=module -e "$1"; :', process.execPath, wrapper], {
    cwd: fileURLToPath(new URL("../../..", import.meta.url)),
    env: { ...process.env, [MARK]: mark, npm_lifecycle_event: "demo" },
    stdio: ["ignore", "pipe", "pipe"],
    // A process group of its own, as in a terminal.
    detached: true,
  });
}

/** The processes with the mark that are alive. */
function marked(mark: string): number[] {
  return readdirSync("/proc").flatMap((name) => {
    if (!/^[0-9]+$/.test(name)) return [];
    try {
      // Of a process that has ended and was not waited for, it is empty.
      return readFileSync(`/proc/${name}/environ`, "utf8").includes(`${MARK}=${mark}`)
        ? [Number(name)]
        : [];
    } catch {
      return [];
    }
  });
}

/**
 * Whether the shell has started the wrapper. Until then dash loses one SIGINT in ten: its fork
 * takes the signal, does nothing, and becomes the wrapper.
 */
function isWrapperStarted(mark: string): boolean {
  const node = realpathSync(process.execPath);
  return marked(mark).some((pid) => {
    try {
      return readlinkSync(`/proc/${pid}/exe`) === node;
    } catch {
      return false;
    }
  });
}

/** What a terminal and `kill` do. */
const ENDS = {
  "Ctrl-C": (shell: number) => process.kill(-shell, "SIGINT"),
  "a closed terminal": (shell: number) => process.kill(-shell, "SIGHUP"),
  "SIGTERM to the shell alone": (shell: number) => process.kill(shell, "SIGTERM"),
};

const absence = await nixlAbsence();
const keep = ["--transport", "nixl", "--keep", "--requests", "1", "--max-tokens", "2"];
const proxy = ["proxy", "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2"];
const tries = isLongRun ? Array.from({ length: 17 }, (_, at) => at) : [0];
const cases = tries.flatMap((at) =>
  Object.entries(ENDS).flatMap(([what, end]) => [
    ...(isLongRun || what !== "Ctrl-C"
      ? [{ at, what, end, args: proxy, started: "ready", during: 1_500 }]
      : []),
    ...(absence === undefined && (isLongRun || what === "Ctrl-C")
      ? [{ at, what, end, args: keep, started: "curl http", during: 8_000 }]
      : []),
  ]),
);

it.skipIf(process.platform !== "linux").each(cases)(
  "R12: no process of $args is left $at after $what, and none is started again",
  async ({ at, end, args, started, during }) => {
    const mark = randomUUID();
    const tree = startTree(mark, args);
    let output = "";
    for (const stream of [tree.stdout, tree.stderr])
      stream?.on("data", (piece) => (output += piece));
    await expect.poll(() => isWrapperStarted(mark), { timeout: 20_000, interval: 1 }).toBe(true);
    // Every second time while processes are being started.
    if (at % 2 === 1) await sleep(Math.random() * during);
    else await expect.poll(() => output, { timeout: 120_000 }).toContain(started);
    end(tree.pid ?? 0);
    await expect.poll(() => marked(mark), { timeout: 20_000, interval: 100 }).toEqual([]);
    await sleep(200);
    expect(marked(mark)).toEqual([]);
    expect(output).not.toContain("process-restarted");
  },
  180_000,
);

it
  .skipIf(process.platform !== "linux" || absence !== undefined)
  .each(someOf(["SIGKILL", "SIGTERM"] as const, 2))(
  "the servers of a demo end when it is ended with %s",
  async (signal) => {
    const mark = randomUUID();
    trees.push(mark);
    const demo = startDemo(keep, { [MARK]: mark });
    let stderr = "";
    demo.stderr?.on("data", (piece) => (stderr += piece));
    await expect.poll(() => stderr, { timeout: 90_000 }).toContain("curl http://127.0.0.1:");
    // A prefill, a decode and a proxy beside it.
    expect(marked(mark).length).toBeGreaterThan(3);
    demo.kill(signal);
    await expect.poll(() => marked(mark), { timeout: 30_000 }).toEqual([]);
  },
  180_000,
);
