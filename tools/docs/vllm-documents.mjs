// The commands of docs/vllm-documents.md: npm test checks with its own report that each vitest
// command names tests that pass.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { root } from "../setup/setup.mjs";
import { notShown } from "./named-tests.mjs";

/**
 * The rows of the page, each with its commands. A command that takes 10 s or more has its time
 * beside it, and one of npm what its output `shows`.
 */
export function rows() {
  const page = readFileSync(join(root, "docs/vllm-documents.md"), "utf8");
  return page.split("\n").flatMap((line) => {
    const [, id = "", cells = ""] = /^\| ([SB]\d+(?:\.\d+)?) \|(.*)$/.exec(line) ?? [];
    const commands = Array.from(
      cells.matchAll(/`(np[mx] [^`]+)`( \(\d+ (?:s|min)\))?(?: shows ((?:`[^`]+`(?: and )?)+))?/g),
      ([, text = "", time, shown = ""]) => ({
        text,
        isLong: time !== undefined,
        shows: Array.from(shown.matchAll(/`([^`]+)`/g), ([, each]) => each),
      }),
    );
    return id === "" ? [] : [{ id, commands }];
  });
}

/**
 * The file, and the part of tests' names, of each `npx vitest run` command. Without a name it runs
 * the whole file.
 */
export function vitestCommands() {
  return rows().flatMap(({ commands }) =>
    commands.flatMap((command) => {
      const [, file, name = ""] = /^npx vitest run (\S+)(?: -t "(.+)")?$/.exec(command.text) ?? [];
      return file === undefined ? [] : [{ ...command, file, name }];
    }),
  );
}

/** Throws with the commands whose tests a report of vitest does not show, as `notShown` says it. */
export function checkCommands(report) {
  const wrong = notShown(vitestCommands(), report);
  if (wrong.length > 0) throw new Error(wrong.map(({ text }) => text).join("\n"));
}
