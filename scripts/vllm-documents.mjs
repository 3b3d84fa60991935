// The commands of docs/vllm-documents.md: npm test checks with its own report that each vitest command names tests that pass.
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { root } from "./setup.mjs";
import { isWhole } from "./suites.mjs";

/** The rows of the page, each with its commands. A command that takes 10 s or more has its time beside it. */
export function rows() {
  const page = readFileSync(join(root, "docs/vllm-documents.md"), "utf8");
  return page.split("\n").flatMap((line) => {
    const [, id = "", cells = ""] = /^\| ([SB]\d+(?:\.\d+)?) \|(.*)$/.exec(line) ?? [];
    const commands = Array.from(
      cells.matchAll(/`(np[mx] [^`]+)`( \(\d+ (?:s|min)\))?/g),
      ([, text, time]) => ({ text, isLong: time !== undefined }),
    );
    return id === "" ? [] : [{ id, commands }];
  });
}

/** The file, and the part of tests' names, of each `npx vitest run` command. Without a name it runs the whole file. */
export function vitestCommands() {
  return rows().flatMap(({ commands }) =>
    commands.flatMap((command) => {
      const [, file, name = ""] = /^npx vitest run (\S+)(?: -t "(.+)")?$/.exec(command.text) ?? [];
      return file === undefined ? [] : [{ ...command, file, name }];
    }),
  );
}

/** The commands that name no test which has passed in a report of vitest (`--reporter=json`). Throws with their text. Files that npm test leaves out are checked in CI. */
export function checkCommands({ testResults }) {
  const tests = new Map(testResults.map((file) => [file.name.slice(root.length), file.assertionResults]));
  const wrong = vitestCommands().filter(({ file, name }) => {
    if (!isWhole && !tests.has(file)) return !existsSync(join(root, file));
    const found = (tests.get(file) ?? []).filter(({ fullName }) => fullName.includes(name));
    // A test that needs NIXL has its own report of being skipped.
    return found.length === 0 || found.some(({ status }) => status === "failed");
  });
  if (wrong.length > 0) throw new Error(wrong.map(({ text }) => text).join("\n"));
}
