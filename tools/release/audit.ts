import { execFile } from "node:child_process";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { promisify } from "node:util";

const execute = promisify(execFile);

/**
 * npm runs a script of theirs. That of protobufjs, of `@kv/epp`, compares a version and prints a
 * warning.
 */
const KNOWN_SCRIPTS = new Set(["protobufjs"]);

interface Audit {
  readonly vulnerabilities?: Readonly<Record<string, { readonly severity: string }>>;
}

/**
 * What `npm audit` knows of the installed dependencies. Undefined where the registry serves no
 * audits.
 */
export async function auditProblems(
  folder: string,
  registry?: string,
): Promise<string[] | undefined> {
  const from = registry === undefined ? [] : ["--registry", registry];
  const args = ["audit", "--json", "--omit", "dev", ...from];
  // npm exits with 1 where it finds something, and where the registry refuses.
  const { stdout } = await execute("npm", args, { cwd: folder, maxBuffer: 64 << 20 }).catch(
    (error: { stdout?: string }) => ({ stdout: error.stdout ?? "" }),
  );
  const { vulnerabilities } = JSON.parse(stdout || "{}") as Audit;
  if (vulnerabilities === undefined) return undefined;
  return Object.entries(vulnerabilities).map(
    ([name, { severity }]) => `installs ${name}, which has a known vulnerability (${severity})`,
  );
}

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
