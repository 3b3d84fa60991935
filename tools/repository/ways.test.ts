import { existsSync, readFileSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { describe, expect, test } from "vitest";
import { root } from "./source-files.js";

/**
 * Checks the tables of docs/architecture.md, which list the files that a request passes, against
 * the imports.
 */
const page = readFileSync(join(root, "docs/architecture.md"), "utf8");
const ways = page
  .slice(page.indexOf("## The ways through the code"))
  .split(/^### /m)
  .slice(1)
  .map((text) => ({
    name: text.split("\n")[0] ?? "",
    files: Array.from(text.matchAll(/^\| `([^`]+\.ts)` \|/gm), ([, file = ""]) => file),
  }));

/** Paths that a source file imports: files, and `packages/NAME` for a package. */
function importsOf(file: string): Set<string> {
  const text = readFileSync(join(root, file), "utf8");
  const found = new Set<string>();
  for (const [, specifier = ""] of text.matchAll(/\bfrom "([^"]+)"/g)) {
    if (specifier.startsWith("."))
      found.add(relative(root, resolve(root, dirname(file), specifier)).replace(/\.js$/, ".ts"));
    else if (specifier.startsWith("@kv/")) found.add(`packages/${specifier.split("/")[1]}`);
  }
  return found;
}

/** Whether one of the two files imports the other, or the other's package. */
function areLinked(one: string, other: string): boolean {
  const packageOf = (file: string) => file.split("/").slice(0, 2).join("/");
  const reaches = (from: string, to: string) => {
    const imports = importsOf(from);
    return imports.has(to) || (packageOf(from) !== packageOf(to) && imports.has(packageOf(to)));
  };
  return reaches(one, other) || reaches(other, one);
}

describe.each(ways)("$name", ({ files }) => {
  test("every file exists and is listed once", () => {
    expect(files.filter((file) => !existsSync(join(root, file)))).toEqual([]);
    expect(new Set(files).size).toBe(files.length);
  });

  test("each file imports a file above it, or is imported by one", () => {
    const lost = files.filter(
      (file, i) => i > 0 && !files.slice(0, i).some((above) => areLinked(above, file)),
    );
    expect(lost).toEqual([]);
  });
});
