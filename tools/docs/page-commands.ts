import type { Page } from "../site/pages.js";

/** A command line of a page. */
export interface PageCommand {
  /** The page's file in the repository. */
  readonly page: string;
  /** The command, without its comment. */
  readonly line: string;
  /** The paragraph _Needs …_ above its block: it does not run anywhere. */
  readonly needs: string | undefined;
  /**
   * What the page shows of its output: the lines of the block `text` below. `…` stands for any text
   * within a line, and alone for any lines.
   */
  readonly shows: readonly string[];
}

const BLOCK =
  /(?:^_(Needs (?:.|\n(?!\n))*?)_\n\n)?^```sh\n([\s\S]*?)^```$(?:\n\n```text\n([\s\S]*?)^```$)?/gm;

/** The commands of pages. */
export function pageCommands(pages: readonly Page[]): PageCommand[] {
  return pages.flatMap(({ source, text }) =>
    [...text.matchAll(BLOCK)].flatMap(([, needs, block = "", shown = ""]) => {
      const lines = block
        .replaceAll(/\\\n\s*/g, "")
        .split("\n")
        .map((line) => line.replace(/\s+#.*$/, "").trim())
        .filter((line) => line !== "" && !line.startsWith("#"));
      const shows = shown.split("\n").filter((line) => !["", "…"].includes(line.trim()));
      // The output below a block is that of its last command.
      return lines.map((line, at) => ({
        page: source,
        line,
        needs,
        shows: at === lines.length - 1 ? shows : [],
      }));
    }),
  );
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

/**
 * The lines that a page shows of a command's output, and that the output does not have in this
 * order.
 */
export function linesNotPrinted({ shows }: Pick<PageCommand, "shows">, output: string): string[] {
  let rest = output.split("\n");
  return shows.filter((shown) => {
    const pattern = shown
      .trim()
      .split("…")
      .map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    const at = rest.findIndex((line) => new RegExp(`^${pattern.join(".*")}$`).test(line.trim()));
    if (at >= 0) rest = rest.slice(at + 1);
    return at < 0;
  });
}
