import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { cachedFolder } from "../setup/user-cache.mjs";
import { freePort } from "../testing/src/http/listening.js";
import { run } from "./tree.js";

const VERDACCIO = {
  private: true,
  dependencies: { verdaccio: "6.8.0" },
  // One of its plugins asks for a tag (`cjs`) that mirrors of the registry lack.
  overrides: { "node-fetch": "2.7.0" },
};
const DEADLINE_MS = 60_000;

/** Installs packages once into a folder of the user's cache, and returns it. */
export const cachedTool = (name: string, manifest: object): Promise<string> =>
  cachedFolder(name, async (work: string) => {
    await writeFile(join(work, "package.json"), JSON.stringify(manifest));
    await run("npm", ["install", "--ignore-scripts", "--no-audit", "--no-fund"], { cwd: work });
  });

/** In the containers of kv-proxy and kv-epp. */
export const CONTAINER_NODE = "26.12.1";

export async function containerNode(version = CONTAINER_NODE): Promise<string> {
  const name = `node-linux-${process.arch}`;
  const manifest = { private: true, dependencies: { [name]: version } };
  return join(await cachedTool(`node-${version}`, manifest), "node_modules", name, "bin/node");
}

export interface Registry extends AsyncDisposable {
  readonly url: string;
  /** npm's configuration with this registry and a token. */
  readonly npmrc: string;
}

/**
 * Verdaccio on the loopback. Packages of others come from the registry that npm is configured with.
 */
export async function startRegistry(folder: string): Promise<Registry> {
  const tool = await cachedTool(`verdaccio-${VERDACCIO.dependencies.verdaccio}`, VERDACCIO);
  await mkdir(folder, { recursive: true });
  const upstream = (await run("npm", ["config", "get", "registry"], { cwd: folder })).trim();
  const port = await freePort();
  const config = {
    storage: join(folder, "storage"),
    auth: { htpasswd: { file: join(folder, "htpasswd") } },
    uplinks: { upstream: { url: upstream, maxage: "60m" } },
    packages: {
      "@kv/*": { access: "$all", publish: "$all" },
      "**": { access: "$all", proxy: "upstream" },
    },
    max_body_size: "200mb",
    web: { enable: false },
    log: { type: "stdout", format: "json", level: "warn" },
  };
  const file = join(folder, "config.yaml");
  // JSON is YAML.
  await writeFile(file, JSON.stringify(config));
  const program = join(tool, "node_modules/verdaccio/bin/verdaccio");
  const args = [program, "--config", file, "--listen", `127.0.0.1:${port}`];
  const child = spawn(process.execPath, args, { cwd: folder, stdio: "ignore" });
  const url = `http://127.0.0.1:${port}/`;
  const npmrc = join(folder, "npmrc");
  await writeFile(
    npmrc,
    `registry=${url}\n//127.0.0.1:${port}/:_authToken=rehearsal\nengine-strict=true\n`,
  );
  const close = async () => {
    if (child.exitCode !== null || child.signalCode !== null) return;
    child.kill();
    await once(child, "exit");
  };
  try {
    await untilAnswers(url, () => child.exitCode);
  } catch (error) {
    await close();
    throw error;
  }
  return { url, npmrc, [Symbol.asyncDispose]: close };
}

async function untilAnswers(url: string, exitCode: () => number | null): Promise<void> {
  const deadline = Date.now() + DEADLINE_MS;
  for (;;) {
    if (exitCode() !== null) throw new Error(`the registry ended with ${exitCode()}`);
    const answered = await fetch(`${url}-/ping`).then(
      ({ ok }) => ok,
      () => false,
    );
    if (answered) return;
    if (Date.now() > deadline)
      throw new Error(`the registry did not answer within ${DEADLINE_MS} ms`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}
