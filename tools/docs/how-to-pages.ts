import { readdirSync, readFileSync } from "node:fs";
import { join, relative } from "node:path";
import { root } from "../repository/source-files.js";

/** A how-to page that builds a package, and the options by which the reference app loads it. */
export interface HowTo {
  readonly page: string;
  /** The source of its module, without the extension. */
  readonly module: string;
  /** Options of the demo. `folder` is an empty folder. */
  readonly demo: (module: string, folder: string) => readonly string[];
}

export const HOW_TOS: readonly HowTo[] = [
  {
    page: "add-a-connector",
    module: "index",
    demo: (module, folder) => [
      "--connector",
      "FolderConnector",
      "--connector-module",
      module,
      "--extra-config",
      JSON.stringify({ folder }),
    ],
  },
  {
    page: "add-a-platform",
    module: "platform",
    demo: (module) => ["--platform-module", module, "--staging-blocks", "64"],
  },
  {
    page: "add-a-transport",
    module: "transport",
    demo: (module) => ["--transport-module", module],
  },
  {
    page: "add-a-cache-kind",
    module: "index",
    demo: (module) => [
      "--cache-kind-module",
      module,
      "--prefill-tp",
      "2",
      "--decode-block-size",
      "32",
    ],
  },
];

/** The folder of the page's package in this checkout. */
export const packageOf = (page: string) => join(root, "examples", page);

export const textOf = (page: string) =>
  readFileSync(join(root, "docs/how-to", `${page}.md`), "utf8");

/** The files of the page's package, relative to its folder. */
export const packageFiles = (page: string): readonly string[] =>
  readdirSync(packageOf(page), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map(({ parentPath, name }) => relative(packageOf(page), join(parentPath, name)));

/**
 * The files of a recipe. Each is a line with the path in bold code, an empty line, and a fenced
 * block.
 */
export function filesOf(text: string): Map<string, string> {
  const blocks = text.matchAll(/^\*\*`([\w./-]+)`\*\*\n\n```\w+\n([\s\S]*?)^```$/gm);
  return new Map(Array.from(blocks, ([, path = "", content = ""]) => [path, content]));
}
