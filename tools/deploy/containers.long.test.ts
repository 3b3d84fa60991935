// A long suite: runs the steps of each container file.
import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { closure, packAll } from "../pack/tarballs.js";
import { root } from "../release/packages.js";
import { CONTAINER_NODE } from "../release/registry.js";
import { run } from "../release/tree.js";

// The steps of each container file, in a folder in place of an image: no container engine is
// needed.
const PROGRAMS = [
  { name: "kv-proxy", package: "@kv/proxy", settings: "proxy" },
  { name: "kv-epp", package: "@kv/epp", settings: "envoy" },
] as const;

let work = "";
let tarballs: ReadonlyMap<string, string> = new Map();

beforeAll(async () => {
  work = mkdtempSync(join(tmpdir(), "kv-containers-"));
  const needed = closure(PROGRAMS.map((program) => program.package));
  tarballs = await packAll(join(work, "tarballs"), needed);
}, 300_000);
afterAll(() => rmSync(work, { recursive: true, force: true }));

/** The instructions of a container file, each on one line. */
const instructionsOf = (name: string) =>
  readFileSync(join(root, `deploy/containers/${name}/Containerfile`), "utf8")
    .replaceAll(/\\\n/g, " ")
    .split("\n")
    .filter((line) => line !== "" && !line.startsWith("#"))
    .map((line) => {
      const [, instruction = "", rest = ""] = /^(\S+) +(.*)$/.exec(line) ?? [];
      return { instruction, rest };
    });

/** The first line on stdout of a program. */
async function firstLine(child: ChildProcess): Promise<string> {
  let log = "";
  child.stderr?.on("data", (chunk) => {
    log = `${log}${chunk}`.slice(-4_000);
  });
  const ended = once(child, "exit").then(() => {
    throw new Error(log);
  });
  ended.catch(() => {});
  return String(
    (await Promise.race([once(child.stdout as NodeJS.ReadableStream, "data"), ended]))[0],
  );
}

describe.each(PROGRAMS)("deploy/containers/$name", ({ name, package: packageName, settings }) => {
  const instructions = instructionsOf(name);
  const restOf = (wanted: string) =>
    instructions.filter(({ instruction }) => instruction === wanted).map(({ rest }) => rest);

  test("the image has Node and what was installed, and is not root's", () => {
    const [major] = CONTAINER_NODE.split(".");
    expect(restOf("FROM")).toEqual([
      `docker.io/library/node:${major}-bookworm-slim AS install`,
      `docker.io/library/node:${major}-bookworm-slim`,
    ]);
    const inResult = instructions.slice(
      instructions.findLastIndex(({ instruction }) => instruction === "FROM") + 1,
    );
    expect(inResult.map(({ instruction }) => instruction)).toEqual([
      "WORKDIR",
      "COPY",
      "USER",
      "ENV",
      "EXPOSE",
      "ENTRYPOINT",
      "CMD",
    ]);
    expect(restOf("USER")).toEqual(["1000:1000"]);
  });

  test("the program starts from the installed files with its manifests' settings, and ends at SIGTERM", async () => {
    // COPY kv-*.tgz ./
    const app = join(work, name);
    mkdirSync(app);
    for (const needed of closure([packageName])) {
      const tarball = tarballs.get(needed) ?? "";
      copyFileSync(tarball, join(app, basename(tarball)));
    }
    const [install = ""] = restOf("RUN");
    const npm = {
      npm_config_prefer_offline: "true",
      npm_config_audit: "false",
      npm_config_fund: "false",
    };
    await run("sh", ["-c", install], { cwd: app, env: { ...process.env, ...npm } });
    expect(existsSync(join(app, "node_modules/@kubernetes/client-node"))).toBe(true);

    const given = JSON.parse(
      readFileSync(join(root, `deploy/${settings}/config.json`), "utf8"),
    ) as Record<string, object>;
    const local = { host: "127.0.0.1", port: 0 };
    const config = {
      ...given,
      ...local,
      timeouts: { graceMs: 1000 },
      ...(name === "kv-epp" ? { healthPort: 0, metricsServer: local } : { admin: local }),
    };
    const file = join(app, "config.json");
    writeFileSync(file, JSON.stringify(config));
    // An API server that nobody runs: the program waits for it.
    const kubeconfig = join(app, "kubeconfig");
    const cluster = { name: "none", cluster: { server: "http://127.0.0.1:9" } };
    const context = { name: "none", context: { cluster: "none", user: "none" } };
    const users = [{ name: "none", user: {} }];
    const current = { "current-context": "none", clusters: [cluster], contexts: [context], users };
    writeFileSync(kubeconfig, JSON.stringify({ apiVersion: "v1", kind: "Config", ...current }));

    const [program = "", ...entry] = JSON.parse(restOf("ENTRYPOINT")[0] ?? "[]") as string[];
    const [flag = ""] = JSON.parse(restOf("CMD")[0] ?? "[]") as string[];
    const env = {
      PATH: process.env["PATH"],
      NODE_ENV: "production",
      KUBECONFIG: kubeconfig,
      HOME: "/nonexistent",
    };
    const child = spawn(program, [...entry, flag, file], {
      cwd: app,
      env,
      stdio: ["ignore", "pipe", "pipe"],
    });
    try {
      expect(await firstLine(child)).toMatch(new RegExp(`^${name} ready `));
      const exited = once(child, "exit");
      child.kill("SIGTERM");
      expect((await exited)[0]).toBe(0);
    } finally {
      child.kill("SIGKILL");
    }
  }, 240_000);
});
