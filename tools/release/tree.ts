import { execFile } from "node:child_process";
import { cp, mkdir } from "node:fs/promises";
import { dirname, join } from "node:path";
import { promisify } from "node:util";
import { copyAttributions } from "../../native/scripts/pack.mjs";
import { publishedPackages, readManifest, root } from "./packages.js";

const execute = promisify(execFile);

/** Returns stdout. The error of a failure contains both streams. */
export async function run(
  command: string,
  args: readonly string[],
  { cwd, env }: { readonly cwd: string; readonly env?: NodeJS.ProcessEnv | undefined },
): Promise<string> {
  try {
    const { stdout } = await execute(command, args, {
      cwd,
      maxBuffer: 256 << 20,
      ...(env === undefined ? {} : { env }),
    });
    return stdout;
  } catch (error) {
    const { stdout = "", stderr = "" } = error as { stdout?: string; stderr?: string };
    throw new Error(`${command} ${args.join(" ")} failed in ${cwd}\n${stdout}${stderr}`, {
      cause: error,
    });
  }
}

export function pnpm(args: readonly string[], cwd: string): Promise<string> {
  return run("npx", ["--yes", readManifest(root).packageManager ?? "pnpm", ...args], { cwd });
}

/** Returns the tarballs by package. */
export async function pack(
  tree: string,
  names: readonly string[],
  into: string,
): Promise<ReadonlyMap<string, string>> {
  copyAttributions(tree);
  const filters = names.flatMap((name) => ["--filter", name]);
  const output = await pnpm(
    ["--recursive", ...filters, "pack", "--json", "--pack-destination", into],
    tree,
  );
  const packed = JSON.parse(output) as readonly {
    readonly name: string;
    readonly filename: string;
  }[];
  return new Map(packed.map(({ name, filename }) => [name, filename]));
}

/**
 * Copies what git tracks or would track and what the build has written, and installs the links of
 * dependencies.
 */
export async function copyTree(tree: string): Promise<void> {
  const listed = await run(
    "git",
    ["ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    {
      cwd: root,
    },
  );
  const built = [...publishedPackages().values()].flatMap(({ folder, manifest }) =>
    (manifest.files ?? []).map((path) => `${folder}/${path}`),
  );
  for (const path of new Set([...listed.split("\0").filter((path) => path !== ""), ...built])) {
    await mkdir(dirname(join(tree, path)), { recursive: true });
    await cp(join(root, path), join(tree, path), { recursive: true }).catch(ignoreMissing);
  }
  const git = (...args: string[]) =>
    run("git", ["-c", "user.name=release", "-c", "user.email=release@localhost", ...args], {
      cwd: tree,
    });
  await git("init", "--quiet", "--initial-branch", "main");
  await git("add", "--all");
  await git("commit", "--quiet", "--message", "the tree that is released");
  await pnpm(["install", "--frozen-lockfile", "--ignore-scripts", "--prefer-offline"], tree);
}

/** A file that git still lists may have been deleted. */
function ignoreMissing(error: NodeJS.ErrnoException): void {
  if (error.code !== "ENOENT") throw error;
}
