import { builtProgram } from "@kv/testing/node-programs";
import type { Page } from "../site/pages.js";

export const PROGRAMS: readonly string[] = [
  "kv-epp",
  "kv-neuron",
  "kv-nixl",
  "kv-peer",
  "kv-plan",
  "kv-pool",
  "kv-proxy",
  "demo",
];

/** A command line of a page. */
export interface PageCommand {
  /** The page's file in the repository. */
  readonly page: string;
  /** The command, without its comment. */
  readonly line: string;
  /** The paragraph _Needs …_ above its block: it does not run anywhere. */
  readonly needs: string | undefined;
}

const BLOCK = /(?:^_(Needs (?:.|\n(?!\n))*?)_\n\n)?^```sh\n([\s\S]*?)^```$/gm;

/** The commands of pages. */
export function pageCommands(pages: readonly Page[]): PageCommand[] {
  return pages.flatMap(({ source, text }) =>
    [...text.matchAll(BLOCK)].flatMap(([, needs, block = ""]) =>
      block
        .replaceAll(/\\\n\s*/g, "")
        .split("\n")
        .map((line) => line.replace(/\s+#.*$/, "").trim())
        .filter((line) => line !== "" && !line.startsWith("#"))
        .map((line) => ({ page: source, line, needs })),
    ),
  );
}

/**
 * The words of a command line, without `npx --no-install`, npm's `run` and the `--` of its
 * arguments.
 */
export function wordsOf(line: string): {
  readonly runner: string;
  readonly words: readonly string[];
} {
  const [first = "", ...rest] = Array.from(line.matchAll(/'[^']*'|"[^"]*"|\S+/g), ([word]) =>
    word.replace(/^['"]|['"]$/g, ""),
  );
  if (first === "npm" && rest[0] === "run")
    return {
      runner: "npm",
      words: rest.slice(1).filter((word) => !["--silent", "-s", "--"].includes(word)),
    };
  if (first === "npx")
    return { runner: "npx", words: rest.filter((word) => word !== "--no-install") };
  return { runner: "", words: [first, ...rest] };
}

/** What `node` runs for a command of this repository; undefined for a command of another. */
export function nodeArguments(line: string): readonly string[] | undefined {
  const [program = "", ...args] = wordsOf(line).words;
  if (PROGRAMS.includes(program)) return [builtProgram(program), ...args];
  return program === "node" ? args : undefined;
}

/** The lines of a page without its fenced blocks. */
const withoutFences = (text: string): readonly string[] =>
  text.replaceAll(/^ *```[\s\S]*?^ *```$/gm, "").split("\n");

/** The code of a page's sentences, tables and indented blocks. */
export function codeOf(text: string): string[] {
  const lines = withoutFences(text);
  const inline = lines.flatMap((line) =>
    Array.from(line.matchAll(/`([^`]+)`/g), ([, code = ""]) => code),
  );
  const indented = lines
    .filter((line) => /^ {4,}\S/.test(line))
    .map((line) => line.replace(/ +# .*$/, "").trim());
  return [...inline, ...indented];
}
