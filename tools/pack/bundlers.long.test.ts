// A long suite: installs bundlers, and builds with each of them. The recipes of
// docs/recipes/bundlers.md, with the packed packages: each output runs alone, in another folder.

import { type ChildProcess, execFile, spawn } from "node:child_process";
import { cp, mkdir, mkdtemp, readdir, readFile, rename, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { promisify } from "node:util";
import { freePort } from "@kv/testing/http/listening";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, describe, expect, test } from "vitest";
import { filesOf } from "../docs/how-to-pages.js";
import { root } from "../release/packages.js";
import { packForInstall } from "./install.js";

const TOOLS = [
  "esbuild@0.28.2",
  "webpack@5.113.0",
  "@vercel/nft@1.11.5",
  "postject@1.0.0-alpha.6",
  "next@16.4.6",
  "react@19.3.1",
  "react-dom@19.3.1",
];
const SECTIONS = [
  "esbuild",
  "webpack",
  "@vercel/nft",
  "Next.js, standalone",
  "A single executable application (SEA)",
  "node --permission",
];
const page = await readFile(join(root, "docs/recipes/bundlers.md"), "utf8");
const run = promisify(execFile);

const work = scratchFolder();
const project = () => join(work, "project");

beforeAll(async () => {
  const install = await packForInstall(["@kv/nixl"], join(work, "tarballs"), () => {});
  await mkdir(project());
  await mkdir(join(work, "home"));
  await writeFile(
    join(project(), "package.json"),
    JSON.stringify({ private: true, type: "module" }),
  );
  const flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"];
  await run("bash", ["-c", [install, ...flags, ...TOOLS].join(" ")], { cwd: project() });
  for (const [path, content] of filesOf(page)) {
    await mkdir(dirname(join(project(), path)), { recursive: true });
    await writeFile(join(project(), path), content);
  }
}, 300_000);

/**
 * The lines of a section's commands. Those with a folder run a program in a copy of this folder
 * alone.
 */
function commandsOf(section: string): { line: string; folder: string | undefined }[] {
  const text = page.split(/^## /m).find((each) => each.startsWith(`${section}\n`)) ?? "";
  const block = /^```bash\n([\s\S]*?)^```$/m.exec(text)?.[1] ?? "";
  return block
    .trimEnd()
    .split("\n")
    .map((each) => ({
      line: each.replace(/ +# .*$/, ""),
      folder: /# alone: (\S+)$/.exec(each)?.[1],
    }));
}

/** Node 20 has the flag under its older name. */
const forThisNode = (line: string) =>
  process.allowedNodeEnvironmentFlags.has("--permission")
    ? line
    : line.replace("--permission", "--experimental-permission");

/** What a server answers on /move, once it listens. */
async function answerOf(server: ChildProcess, port: number): Promise<string> {
  let said = "";
  for (const stream of [server.stdout, server.stderr])
    stream?.on("data", (chunk) => (said += chunk));
  for (let tries = 0; tries < 200 && server.exitCode === null; tries++) {
    const answer = await fetch(`http://127.0.0.1:${port}/move`).catch(() => undefined);
    if (answer !== undefined) return await answer.text();
    await new Promise((done) => setTimeout(done, 100));
  }
  throw new Error(`the server did not answer: ${said}`);
}

/**
 * Copies a folder alone to another place, takes away the project, and runs the line there. Returns
 * what it wrote, and the libraries that any process of it loaded from elsewhere than that folder
 * and the system.
 */
async function runAlone(
  line: string,
  folder: string,
  change: (alone: string) => Promise<void> = async () => {},
) {
  const alone = await mkdtemp(join(work, "alone-"));
  await cp(join(project(), folder), alone, { recursive: true, verbatimSymlinks: true });
  await change(alone);
  const logs = await mkdtemp(join(work, "loader-"));
  const port = await freePort();
  const env = {
    PATH: process.env["PATH"],
    HOME: join(work, "home"),
    PORT: `${port}`,
    HOSTNAME: "127.0.0.1",
    // The loader of glibc writes each library that it initializes.
    LD_DEBUG: "files",
    LD_DEBUG_OUTPUT: join(logs, "ld"),
  };
  const here = forThisNode(line).replaceAll(`$PWD/${folder}`, alone).replaceAll(folder, alone);
  await rename(project(), join(work, "away"));
  try {
    let text: string;
    if (/server\.js$/.test(line)) {
      const server = spawn("bash", ["-c", `exec ${here}`], {
        cwd: alone,
        env,
        stdio: ["ignore", "pipe", "pipe"],
      });
      text = await answerOf(server, port).finally(() => server.kill("SIGKILL"));
    } else {
      const { stdout, stderr } = await run("bash", ["-c", `exec ${here}`], {
        cwd: alone,
        env,
      }).catch((error) => error);
      text = stdout || stderr;
    }
    const files = await Promise.all(
      (await readdir(logs)).map((name) => readFile(join(logs, name), "utf8")),
    );
    const loaded = files.flatMap((file) =>
      [...file.matchAll(/calling init: (\/.*)$/gm)].map(([, path = ""]) => path),
    );
    return {
      text,
      addons: loaded.filter((path) => path.endsWith("/kv_nixl.node")),
      elsewhere: loaded.filter(
        (path) => !path.startsWith(`${alone}/`) && !/^(\/usr)?\/lib(64)?\//.test(path),
      ),
    };
  } finally {
    await rename(join(work, "away"), project());
  }
}

describe.skipIf(nixlMissing)(
  `bundles of @kv/nixl, each alone in a folder (${nixlMissing ?? "found"})`,
  () => {
    test.each(SECTIONS)(
      "%s: moves 65,536 bytes, and loads nothing from elsewhere",
      { timeout: 300_000 },
      async (section) => {
        const commands = commandsOf(section);
        for (const { line, folder } of commands) {
          if (folder === undefined) {
            const env = { ...process.env, NEXT_TELEMETRY_DISABLED: "1" };
            await run("bash", ["-c", line], { cwd: project(), env });
            continue;
          }
          const { text, addons, elsewhere } = await runAlone(line, folder);
          expect(text, line).toBe("moved 65536\n");
          expect(elsewhere, line).toEqual([]);
          expect(addons.length, line).toBeGreaterThan(0);
        }
        expect(commands.some(({ folder }) => folder !== undefined)).toBe(true);
      },
    );

    test("a bundle without its packages says so, and takes no addon that lies where a checkout has its own", async () => {
      const [, , { line, folder = "" } = { line: "" }] = commandsOf("esbuild");
      const { text, addons } = await runAlone(
        line.replace("app.cjs", "packages/nixl/dist/app.cjs"),
        folder,
        async (alone) => {
          await mkdir(join(alone, "packages/nixl/dist"), { recursive: true });
          await mkdir(join(alone, "native/build"), { recursive: true });
          await rename(join(alone, "app.cjs"), join(alone, "packages/nixl/dist/app.cjs"));
          const [addon = ""] = (await readdir(join(alone, "node_modules/@kv"))).filter((name) =>
            /^nixl-linux/.test(name),
          );
          await rename(
            join(alone, "node_modules/@kv", addon, "kv_nixl.node"),
            join(alone, "native/build/kv_nixl.node"),
          );
        },
      );
      expect(text).toContain("KV_ADDON_NOT_FOUND");
      expect(addons).toEqual([]);
    });

    test("checkMetadata is refused in one file, and the error names this page's subject", async () => {
      const [, , { line, folder = "" } = { line: "" }] = commandsOf("esbuild");
      const { text } = await runAlone(`${line} --check`, folder);
      expect(text).toContain("Bundlers and containers");
    });
  },
);
