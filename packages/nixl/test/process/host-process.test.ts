import { readFileSync } from "node:fs";
import { nixlTransport } from "@kv/nixl";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, describe, expect, onTestFinished, test } from "vitest";
import { BOTH_BACKENDS } from "../support/both-backends.js";
import { compile } from "../support/compile.js";
import { listsOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";
import { startPeer } from "../support/peer-process.js";
import { refused } from "../support/refused.js";
import { type ChildEnd, runChild } from "../support/run-child.js";

const readme = readFileSync(new URL("../../README.md", import.meta.url), "utf8");
/** A setlocale() of a library would load this locale, which Debian and Fedora have. */
const LOCALE = { LC_ALL: "C.UTF-8" };

for (const { backend, missing } of BOTH_BACKENDS) {
  describe.skipIf(missing)(
    `N2, N3: what ${backend} does to its process (${missing ?? "found"})`,
    () => {
      let end: ChildEnd;
      // biome-ignore lint/suspicious/noExplicitAny: the child's report, as it wrote it
      let report: any;
      beforeAll(async () => {
        end = await runChild("host-process.ts", [backend], { env: LOCALE });
        expect(end.code, end.stderr).toBe(0);
        // Anything else on stdout would not be JSON.
        report = JSON.parse(end.stdout);
      });

      test("no signal gets a handler, and SIGHUP and the SIGSEGV of WebAssembly are the program's", () => {
        expect(report.before.status.length).toBeGreaterThan(5);
        expect(report.after.status).toEqual(report.before.status);
        expect(report).toMatchObject({ hangups: 1, trapped: "RuntimeError" });
      });

      test("children inherit no descriptor of the libraries", () => {
        expect(report.inheritedAfter.length).toBe(report.inheritedBefore.length);
      });

      test("umask, folder, limits, core dumps, locale and the flags of stdin, stdout and stderr stay", () => {
        expect(report.before.status.join()).toContain("Umask:");
        // The other members have tests of their own.
        const { status: _, code: __, ...kept } = report.before;
        expect(report.after).toMatchObject(kept);
      });

      test("no code of Node and of the libraries that it had loaded is replaced, such as that of malloc", () => {
        expect(report.before.code.join()).toContain("/libc.so.6 ");
        expect(report.after.code).toEqual(report.before.code);
      });

      test("threads: one of each agent, one of UCX for its events, and none when they are closed", () => {
        const ofLibraries = backend === "UCX" ? { async: 1 } : {};
        const { threadsBefore } = report;
        expect(report.threadsAfter).toEqual({ ...threadsBefore, ...ofLibraries, kv_nixl: 1 });
        expect(report.threadsOfTwo).toEqual({ ...threadsBefore, ...ofLibraries, kv_nixl: 2 });
        expect(report.threadsClosed).toEqual(threadsBefore);
      });

      test("only the variables that the README names are set", () => {
        const named = Array.from(
          readme.matchAll(/^\| `((?:UCX|FI)_\w+)` \|/gm),
          ([, name]) => name,
        );
        expect(report.variables.length).toBeGreaterThan(3);
        expect(report.variables.filter((name: string) => !named.includes(name))).toEqual([]);
      });

      test("nothing is written to stderr, and with all logs of the libraries on nothing to stdout", async () => {
        expect(end.stderr).toBe("");
        const logs = { UCX_LOG_LEVEL: "info", NIXL_LOG_LEVEL: "INFO", FI_LOG_LEVEL: "info" };
        const { stdout, stderr } = await runChild("host-process.ts", [backend], {
          env: { ...LOCALE, ...logs },
        });
        expect(() => JSON.parse(stdout), stdout).not.toThrow();
        expect(stderr).toMatch(/nixl_\w+\.cpp/);
        expect(stderr).toMatch(backend === "UCX" ? /UCX {2}INFO/ : "libfabric:");
      });
    },
  );
}

const [ucx] = BOTH_BACKENDS;
test.skipIf(ucx.missing)(
  "calls of a UCX that the addon does not know, or that is there twice, are not replaced, and the log says so",
  async () => {
    const second = await compile(scratchFolder(onTestFinished), "libucp.so.9", {});
    for (const [env, logged] of [
      [{}, []],
      [{ LD_PRELOAD: second }, ["nixl-repair-failed"]],
      [{ LD_PRELOAD: second, KV_NIXL_REPAIRS_OFF: "ucx-lost-answers" }, []],
    ] as const) {
      const { stdout, stderr } = await runChild("create-agent.ts", [], { env });
      expect(JSON.parse(stdout), stderr).toMatchObject({ code: "none", logged });
    }
  },
);

test.skipIf(ucx.missing)(
  "N2: a child that outlives its dead parent keeps no peer believing in it",
  async () => {
    const env = { UCX_TLS: "tcp" };
    const owner = await startPeer(1 << 20, 1, { env });
    const transport = nixlTransport({ env });
    const agent = await transport.createAgent();
    const memory = transport.allocate(1 << 20);
    await agent.register(memory);
    await agent.addRemote(owner.metadata);
    const { move } = await listsOf(agent, memory, owner.name, owner, 65_536, 16);
    const read = () => move("READ", scattered(16), { timeoutMs: 10_000 }).done;
    await read();
    const child = await owner.ask<number>("spawn");
    await owner.kill();
    try {
      const begun = performance.now();
      await refused(read, "KV_TRANSFER_FAILED");
      expect(performance.now() - begun).toBeLessThan(5000);
    } finally {
      process.kill(child, "SIGKILL");
      await transport.close();
      memory.close();
    }
  },
);

test.skipIf(ucx.missing)(
  "F2: the descriptors of the libraries are closed on exec by themselves, for children that are made without fork",
  async () => {
    const { stdout, stderr } = await runChild("kept-descriptors.ts");
    expect(JSON.parse(stdout || "{}"), stderr).toEqual({ moved: 7, after: [] });
  },
);
