import { readFileSync } from "node:fs";
import { join } from "node:path";
import { expect, test } from "vitest";
import { root, sourceFiles } from "./source-files.js";

test("field.md P1: only @kv/protocol reads the text of a notification", () => {
  const readers = sourceFiles(root, ["packages", "apps"])
    .filter((path) => /^(packages|apps)\/(?!protocol\/|testing\/)[^/]+\/src\//.test(path))
    .filter((path) =>
      /["'](HB|PUSH_REG|KV1):|lastIndexOf\(":"\)/.test(readFileSync(join(root, path), "utf8")),
    );
  expect(readers).toEqual([]);
});
