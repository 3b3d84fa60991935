import { execFileSync } from "node:child_process";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { expect, test } from "vitest";
import { root } from "./source-files.js";

interface Manifest {
  readonly name: string;
  readonly exports?: Readonly<Record<string, unknown>>;
}

/** Modules that begin a child process wait for their task at the top level. */
const isOfChild = (path: string) => /child|probe/.test(path);

test("first-contact.md 4: require loads each entry of each package", () => {
  const entries = readdirSync(join(root, "packages"))
    .map((folder) => join(root, "packages", folder, "package.json"))
    .filter(existsSync)
    .flatMap((file) => {
      const { name, exports = {} } = JSON.parse(readFileSync(file, "utf8")) as Manifest;
      const paths = Object.keys(exports).filter((path) => !isOfChild(path));
      return paths.map((path) => createRequire(file).resolve(join(name, path)));
    });
  expect(entries.length).toBeGreaterThan(20);
  const load = `for (const entry of ${JSON.stringify(entries)}) require(entry)`;
  expect(execFileSync(process.execPath, ["-e", load], { encoding: "utf8" })).toBe("");
});
