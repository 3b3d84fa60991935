import { join } from "node:path";
import ts from "typescript";
import { publishedPackages, root } from "../release/packages.js";

/**
 * Examples that are not run as programs: the reason, and declarations of the names that the page
 * assumes.
 */
export const NOT_RUN: Readonly<Record<string, { why: string; declarations?: string }>> = {
  "conformance-1": { why: "suites run only inside vitest; the packages' tests run them" },
  "conformance-2": { why: "suites run only inside vitest; the packages' tests run them" },
  "nixl-3": {
    why: "needs a GPU, and an engine that has allocated on it",
    declarations: [
      'declare const agent: import("@kv/interface").Agent;',
      "declare const BLOCK: number;",
      "declare const peerName: string;",
      "declare const peerRows: Float64Array;",
      "declare const localIds: Int32Array;",
      "declare const remoteIds: Int32Array;",
    ].join("\n"),
  },
  "proxy-1": { why: "needs prefill and decode servers" },
};

/** Whether an example needs NIXL's library. */
export const needsNixl = (id: string): boolean => id.startsWith("nixl-");

/** The folders in `packages/` that are published. */
export const published = [...publishedPackages().values()]
  .flatMap(({ folder }) => /^packages\/(.+)$/.exec(folder)?.[1] ?? [])
  .sort();

export interface ReadmeExample {
  /** Such as `protocol-2`: the second example of packages/protocol. */
  readonly id: string;
  readonly code: string;
}

/** The compiler's errors in these files, with this repository's settings and others. */
export function compileErrors(files: readonly string[], more: ts.CompilerOptions = {}): string[] {
  const { config } = ts.readConfigFile(join(root, "tsconfig.json"), ts.sys.readFile) as {
    config: object;
  };
  const given = { ...config, include: [], files };
  const { options } = ts.parseJsonConfigFileContent(given, ts.sys, root);
  return ts
    .getPreEmitDiagnostics(ts.createProgram(files, { ...options, ...more }))
    .filter(({ file }) => file === undefined || files.includes(file.fileName))
    .map(
      ({ file, messageText }) =>
        `${file?.fileName}: ${ts.flattenDiagnosticMessageText(messageText, "\n")}`,
    );
}

/** A page's examples in TypeScript. */
export function examplesOf(name: string, readme: string): ReadmeExample[] {
  return Array.from(readme.matchAll(/^```ts\n([\s\S]*?)^```$/gm), ([, code = ""], index) => ({
    id: `${name}-${index + 1}`,
    code,
  }));
}

/** The packages of a page's first line that installs some, such as `["@kv/pull", "vitest@4"]`. */
export function installLine(readme: string): string[] {
  const [, packages = ""] =
    /^ *npm (?:install|run pack --) (?:--save-dev )?((?:(?!--)[^#\n])+)/m.exec(readme) ?? [];
  return packages
    .trim()
    .split(/\s+/)
    .filter((each) => each !== "");
}

/** The packages that an example imports. */
export function importsOf(code: string): string[] {
  const specifiers = Array.from(
    code.matchAll(/(?:from |import\()"([^"]+)"/g),
    ([, specifier = ""]) => specifier,
  );
  const packages = specifiers.filter((each) => !/^(node:|\.)/.test(each));
  return [...new Set(packages.map((each) => /^(@[^/]+\/)?[^/]+/.exec(each)?.[0] ?? each))];
}

/**
 * The lines that an example prints by its comments (`console.log(…); // line`), and that `stdout`
 * lacks.
 */
export function missingLines(code: string, stdout: string): string[] {
  const printed = stdout.split("\n");
  const expected = Array.from(
    code.matchAll(/\bconsole\.log\(.*\); \/\/ (.*)$/gm),
    ([, text = ""]) => text,
  );
  return expected.filter((line) => !printed.includes(line));
}
