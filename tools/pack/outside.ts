import { mkdir, writeFile } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import ts from "typescript";
import { root } from "../release/packages.js";
import { pnpm, run } from "../release/tree.js";
import { closure, isForPlatform } from "./tarballs.js";

export interface OutsideProject {
  readonly folder: string;
  readonly tarballs: ReadonlyMap<string, string>;
  /** For a packed package the tarball replaces the range. */
  readonly dependencies: Readonly<Record<string, string>>;
  readonly manifest?: Readonly<Record<string, unknown>>;
}

const tarballsOf = ({ tarballs }: OutsideProject, names: Iterable<string>) =>
  Object.fromEntries(
    [...names].flatMap((name) => {
      const path = tarballs.get(name);
      return path === undefined ? [] : [[name, `file:${path}`]];
    }),
  );

async function writeJson(path: string, value: unknown): Promise<void> {
  await mkdir(dirname(path), { recursive: true });
  await writeFile(path, JSON.stringify(value));
}

const member = ({ manifest }: OutsideProject, dependencies: Readonly<Record<string, string>>) => ({
  name: "empty",
  private: true,
  type: "module",
  ...manifest,
  dependencies,
});

/** Outside the repository: packages also resolve each other's hoisted dependencies. */
export async function npmProject(project: OutsideProject): Promise<void> {
  const { folder, dependencies } = project;
  // Those that others depend on come from tarballs too.
  const needed = [...closure(Object.keys(dependencies))];
  const everywhere = needed.filter((name) => !isForPlatform(name));
  await writeJson(join(folder, "package.json"), {
    ...member(project, { ...dependencies, ...tarballsOf(project, everywhere) }),
    optionalDependencies: tarballsOf(project, needed.filter(isForPlatform)),
    overrides: tarballsOf(project, needed),
  });
  // Peers, such as vitest, are the user's.
  const flags = [
    "--ignore-scripts",
    "--no-audit",
    "--no-fund",
    "--prefer-offline",
    "--legacy-peer-deps",
  ];
  await run("npm", ["install", ...flags], { cwd: folder });
}

/**
 * As the only member of a pnpm workspace (the folder above it) without hoisting: each package
 * resolves only what it lists.
 */
export async function pnpmProject(project: OutsideProject): Promise<void> {
  const { folder, dependencies } = project;
  const workspace = dirname(folder);
  const overrides = tarballsOf(project, project.tarballs.keys());
  await writeJson(join(workspace, "package.json"), { name: "workspace", private: true });
  await writeJson(join(workspace, "pnpm-workspace.yaml"), {
    packages: [basename(folder)],
    hoist: false,
    overrides,
  });
  await writeJson(
    join(folder, "package.json"),
    member(project, { ...dependencies, ...tarballsOf(project, Object.keys(dependencies)) }),
  );
  await pnpm(["install", "--ignore-scripts", "--prefer-offline"], workspace);
}

/** Declarations of the language and of Node, parsed once. */
const parsed = new Map<string, ts.SourceFile | undefined>();

/**
 * Errors of the files, and of our declarations that they import, with a user's strictest settings.
 * With `emit`, writes the compiled files.
 */
export function compile(folder: string, files: readonly string[], { emit = false } = {}): string[] {
  const options: ts.CompilerOptions = {
    module: ts.ModuleKind.NodeNext,
    moduleResolution: ts.ModuleResolutionKind.NodeNext,
    target: ts.ScriptTarget.ES2022,
    lib: ["lib.es2023.d.ts", "lib.esnext.disposable.d.ts"],
    strict: true,
    exactOptionalPropertyTypes: true,
    noUncheckedIndexedAccess: true,
    verbatimModuleSyntax: true,
    declaration: true,
    noEmit: !emit,
    types: ["node"],
    typeRoots: [join(root, "node_modules/@types")],
  };
  const host = ts.createCompilerHost(options);
  const parse = host.getSourceFile.bind(host);
  host.getSourceFile = (path, ...rest) => {
    if (!path.startsWith(root)) return parse(path, ...rest);
    if (!parsed.has(path)) parsed.set(path, parse(path, ...rest));
    return parsed.get(path);
  };
  const paths = files.map((file) => join(folder, file));
  const program = ts.createProgram(paths, options, host);
  const concerned = program
    .getSourceFiles()
    .filter(({ fileName }) => paths.includes(fileName) || /[/+]@kv[/+]/.test(fileName));
  const found = [
    ...program.getOptionsDiagnostics(),
    ...program.getGlobalDiagnostics(),
    ...concerned.flatMap((file) => [
      ...program.getSyntacticDiagnostics(file),
      ...program.getSemanticDiagnostics(file),
    ]),
  ];
  if (emit && found.length === 0) program.emit();
  return found.map(
    ({ file, messageText }) =>
      `${file?.fileName ?? ""}: ${ts.flattenDiagnosticMessageText(messageText, "\n")}`,
  );
}

/** Returns the promise of each item at once. */
export function twoAtATime<T, R>(
  items: readonly T[],
  work: (item: T) => Promise<R>,
): Map<T, Promise<R>> {
  const slots: Promise<unknown>[] = [Promise.resolve(), Promise.resolve()];
  return new Map(
    items.map((item, index) => {
      const begun = slots[index % 2]?.then(() => work(item)) ?? work(item);
      slots[index % 2] = begun.catch(() => {});
      return [item, begun];
    }),
  );
}
