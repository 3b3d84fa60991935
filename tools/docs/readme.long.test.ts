// A long suite: runs each example of the READMEs, as a user would.
import { execFile } from "node:child_process";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { someOf } from "@kv/testing/long-run";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { bundled } from "@kv/testing/node-programs";
import { expect, test } from "vitest";
import {
  compileErrors,
  examplesOf,
  importsOf,
  installLine,
  missingLines,
  NOT_RUN,
  needsNixl,
  published,
} from "./readme-examples.js";

/**
 * Type-checks and runs the examples of the packages' READMEs. Each must print the output that its
 * comments show (`console.log(…); // output`). Examples that need hardware or servers are only
 * type-checked.
 */
const run = promisify(execFile);
const root = fileURLToPath(new URL("../../", import.meta.url));
const out = join(root, "build/readme");

const examples = published.flatMap((name) => {
  const text = readFileSync(join(root, "packages", name, "README.md"), "utf8");
  return examplesOf(name, text).map(({ id, code }) => {
    const declarations = NOT_RUN[id]?.declarations ?? "";
    return {
      id,
      code,
      file: join(out, `${id}.ts`),
      source: `${declarations}\n${code}\nexport {};\n`,
    };
  });
});
rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
for (const { file, source } of examples) writeFileSync(file, source);

test("every published package has a README with an example, and every exception is an example that exists", () => {
  const names = new Set(examples.map(({ id }) => id.replace(/-\d+$/, "")));
  expect(published.filter((name) => !names.has(name))).toEqual([]);
  expect(
    Object.keys(NOT_RUN).filter((id) => !examples.some((example) => example.id === id)),
  ).toEqual([]);
});

test.each(published)(
  "the install line of @kv/%s names the package and what its examples import",
  (name) => {
    const readme = readFileSync(join(root, "packages", name, "README.md"), "utf8");
    const installed = installLine(readme).map((each) => each.replace(/(?<=.)@.*$/, ""));
    const needed = examplesOf(name, readme).flatMap(({ code }) => importsOf(code));
    expect(installed).toEqual(expect.arrayContaining([`@kv/${name}`, ...needed]));
    expect(readme).toContain("is an ES module");
  },
);

test("the examples type-check", { timeout: 240_000 }, () => {
  const files = examples.map(({ file }) => file);
  // An example may declare a name and leave its use to the reader.
  const unused = { noUnusedLocals: false, noUnusedParameters: false };
  expect(compileErrors(files, unused)).toEqual([]);
});

const missingFor = (id: string): string | undefined => (needsNixl(id) ? nixlMissing : undefined);
const runnable = someOf(
  examples.filter(({ id }) => NOT_RUN[id] === undefined),
  3,
).map((example) => ({ ...example, missing: missingFor(example.id) }));
for (const { id, file, code, missing } of runnable) {
  test.skipIf(missing)(
    `README example ${id} runs and prints the output that its comments show (${missing ?? "found"})`,
    async () => {
      const { stdout } = await run(process.execPath, [await bundled(file)], { cwd: root });
      expect(missingLines(code, stdout)).toEqual([]);
    },
  );
}
