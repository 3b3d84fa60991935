// The commands of docs/vllm-documents.md: npm test checks with its own report that each vitest
// command names tests that pass.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { root } from "../setup/setup.mjs";
import { notShown } from "./named-tests.mjs";

/**
 * The rows of the page, each with its commands: an npm `script` and what its output `shows`, or a
 * test `file` and a part of tests' names. What takes 10 s or more has its time beside it.
 */
export function rows() {
  const page = readFileSync(join(root, "docs/vllm-documents.md"), "utf8");
  return page.split("\n").flatMap((line) => {
    const [, id = "", cells = ""] = /^\| (S\d+\.\d+) \|(.*)$/.exec(line) ?? [];
    const commands = Array.from(
      cells.matchAll(
        /`(npm [^`]+|[\w./-]+\.test\.ts)`(?: "([^"]+)")?( \(\d+ (?:s|min)\))?(?: shows ((?:`[^`]+`(?: and )?)+))?/g,
      ),
      ([, text = "", name = "", time, shown = ""]) => ({
        text,
        name,
        isLong: time !== undefined,
        shows: Array.from(shown.matchAll(/`([^`]+)`/g), ([, each]) => each),
      }),
    );
    return id === "" ? [] : [{ id, commands }];
  });
}

/** The tests that the page names. Without a name it is the whole file. */
export function vitestCommands() {
  return rows().flatMap(({ commands }) =>
    commands.flatMap(({ text, name }) => (text.startsWith("npm ") ? [] : [{ file: text, name }])),
  );
}

/** Throws with the commands whose tests a report of vitest does not show, as `notShown` says it. */
export function checkCommands(report) {
  const wrong = notShown(vitestCommands(), report);
  if (wrong.length > 0)
    throw new Error(wrong.map(({ file, name }) => `${file} "${name}"`).join("\n"));
}
