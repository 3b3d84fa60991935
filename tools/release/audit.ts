import { execFile } from "node:child_process";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { promisify } from "node:util";

const execute = promisify(execFile);

/**
 * Packages with a script that npm runs when it installs them. That of protobufjs, of `@kv/epp`,
 * compares a version and prints a warning.
 */
const KNOWN_SCRIPTS = new Set(["protobufjs"]);

interface Audit {
  readonly vulnerabilities?: Readonly<Record<string, { readonly severity: string }>>;
}

/**
 * The known vulnerabilities of what npm has installed into a project, without development
 * dependencies, by `npm audit`. Undefined where the registry (its URL, or the one that npm is
 * configured with) serves no audits.
 */
export async function auditProblems(
  folder: string,
  registry?: string,
): Promise<string[] | undefined> {
  const from = registry === undefined ? [] : ["--registry", registry];
  const args = ["audit", "--json", "--omit", "dev", ...from];
  // npm exits with 1 where it finds something, and where the registry refuses; both are in the
  // output.
  const { stdout } = await execute("npm", args, { cwd: folder, maxBuffer: 64 << 20 }).catch(
    (error: { stdout?: string }) => ({ stdout: error.stdout ?? "" }),
  );
  const { vulnerabilities } = JSON.parse(stdout || "{}") as Audit;
  if (vulnerabilities === undefined) return undefined;
  return Object.entries(vulnerabilities).map(
    ([name, { severity }]) => `installs ${name}, which has a known vulnerability (${severity})`,
  );
}

/**
 * The packages of a project that run a script when npm installs them, beside those that are known.
 */
export async function scriptProblems(folder: string): Promise<string[]> {
  const { packages } = JSON.parse(await readFile(join(folder, "package-lock.json"), "utf8")) as {
    readonly packages: Readonly<Record<string, { readonly hasInstallScript?: boolean }>>;
  };
  return Object.entries(packages)
    .map(([path, { hasInstallScript }]) => ({
      name: path.replace(/^.*node_modules\//, ""),
      hasInstallScript,
    }))
    .filter(({ name, hasInstallScript }) => hasInstallScript === true && !KNOWN_SCRIPTS.has(name))
    .map(({ name }) => `installs ${name}, which runs a script then`);
}
