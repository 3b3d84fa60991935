import { mkdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import ts from "typescript";
import { stringify } from "yaml";
import {
  examplesOf,
  installLine,
  missingLines,
  NOT_RUN,
  needsNixl,
  type ReadmeExample,
} from "../docs/readme-examples.js";
import { readManifest } from "./packages.js";
import type { Registry } from "./registry.js";
import { pnpm, run } from "./tree.js";

export interface InstallOptions {
  readonly folder: string;
  readonly registry: Registry;
  readonly manager: "npm" | "pnpm";
  readonly overrides?: Readonly<Record<string, string>> | undefined;
}

/** Into an empty project of ES modules, with `engine-strict`. */
export async function installInto(
  specifiers: readonly string[],
  options: InstallOptions,
): Promise<void> {
  const { folder, registry, manager, overrides = {} } = options;
  await mkdir(folder, { recursive: true });
  const project = { name: "empty", version: "0.0.0", private: true, type: "module", overrides };
  await writeFile(join(folder, "package.json"), JSON.stringify(project));
  await writeFile(join(folder, ".npmrc"), await readFile(registry.npmrc));
  if (manager === "npm") {
    await run("npm", ["install", "--no-audit", "--no-fund", ...specifiers], { cwd: folder });
  } else {
    // A workspace of its own, whatever is above it. pnpm refuses this file in JSON's form. A script
    // of a dependency that is not named fails the install: packages/epp/README.md names this one.
    const allowBuilds = { protobufjs: false };
    const workspace = { packages: ["."], overrides, engineStrict: true, allowBuilds };
    await writeFile(join(folder, "pnpm-workspace.yaml"), stringify(workspace));
    await pnpm(["add", "--workspace-root", ...specifiers], folder);
  }
}

/**
 * Runs a package's README examples with each Node, and the `--version` of its programs. `nixl`:
 * whether NIXL's library is installed.
 */
export async function examineInstalled(
  name: string,
  folder: string,
  { nodes, nixl }: { readonly nodes: readonly string[]; readonly nixl: boolean },
): Promise<string[]> {
  const installed = join(folder, "node_modules", name);
  const short = name.replace("@kv/", "");
  const problems: string[] = [];
  const readme = await readFile(join(installed, "README.md"), "utf8");
  for (const example of examplesOf(short, readme)) {
    if (NOT_RUN[example.id] !== undefined && example.id !== "conformance-1") continue;
    if (needsNixl(example.id) && !nixl) continue;
    for (const node of nodes) {
      const found = await exampleProblems(example, folder, node).catch((error: Error) => [
        error.message,
      ]);
      problems.push(...found.map((each) => `${example.id} with ${node}: ${each}`));
    }
  }
  const { bin = {}, version } = readManifest(installed);
  for (const program of Object.keys(bin)) {
    const printed = await run("npx", ["--no-install", program, "--version"], { cwd: folder });
    if (printed.trim() !== version)
      problems.push(`${program} --version prints ${printed.trim()}, not ${version}`);
  }
  return problems;
}

async function exampleProblems(
  { id, code }: ReadmeExample,
  folder: string,
  node: string,
): Promise<string[]> {
  const { outputText } = ts.transpileModule(code, {
    compilerOptions: { module: ts.ModuleKind.ESNext, target: ts.ScriptTarget.ES2022 },
  });
  if (id === "conformance-1") {
    await writeFile(join(folder, "example.test.mjs"), outputText);
    await run(node, ["node_modules/vitest/vitest.mjs", "run"], { cwd: folder });
    return [];
  }
  const file = join(folder, `${id}.mjs`);
  await writeFile(file, outputText);
  const stdout = await run(node, [file], { cwd: folder });
  return missingLines(code, stdout).map((line) => `does not print: ${line}`);
}

/** Of the README in an unpacked tarball. */
export async function installLineOf(unpacked: string): Promise<string[]> {
  return installLine(await readFile(join(unpacked, "README.md"), "utf8"));
}
