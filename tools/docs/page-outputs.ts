import type { Page } from "../site/pages.js";
import { type PageCommand, pageCommands } from "./page-commands.js";

/** A block `text` of a page, and the command above it, which prints it. */
export interface PageOutput extends PageCommand {
  /** `…` stands for any text within a line, and alone for any lines. */
  readonly text: string;
}

/** The outputs that pages show. One without a command above it has the line "". */
export function pageOutputs(pages: readonly Page[]): PageOutput[] {
  return pages.flatMap((page) =>
    Array.from(page.text.matchAll(/^```text\n([\s\S]*?)^```$/gm), ({ index, 1: text = "" }) => {
      const above = pageCommands([{ ...page, text: page.text.slice(0, index) }]).at(-1);
      return { page: page.source, line: "", needs: undefined, ...above, text };
    }),
  );
}

/**
 * A text without what differs from run to run and from host to host: addresses, numbers, what UCX
 * chooses of the ways within a host, and the widths of columns.
 */
export const masked = (text: string): string =>
  text
    .replaceAll(/(?<=:\/\/|_HOST=)[\w.:]+/g, "#")
    .replaceAll(/\d[\d,.]*/g, "#")
    .replaceAll(/UCX over (?!.*tcp).*? \(/g, "UCX over # (")
    .replaceAll(/; too short[^\n]*/g, "")
    .replaceAll(/ +/g, " ");

export type Mask = (text: string) => string;
const exact: Mask = (text) => text;

/** Whether a page's text shows what was printed, as `mask` leaves both. */
export function isShown(text: string, printed: string, mask: Mask = exact): boolean {
  const pattern = mask(text)
    .replaceAll(/[.*+?^${}()|[\]\\]/g, "\\$&")
    .replaceAll(/^…\n/gm, "(?:.*\n)*?")
    .replaceAll("…", ".*");
  return new RegExp(`^${pattern}$`).test(mask(printed));
}
