import { readdirSync, readFileSync } from "node:fs";
import { expect, it } from "vitest";

const read = (path: string) => readFileSync(new URL(path, import.meta.url), "utf8");

it("docs/design/push.md lists a counterpart for each of vLLM's 30 unit tests, and they are there", () => {
  const files = readdirSync(new URL("./counterparts/", import.meta.url));
  const tests = files
    .map((file) => (file.endsWith(".test.ts") ? read(`./counterparts/${file}`) : ""))
    .join();
  const [, list = ""] = read("../../../docs/design/push.md").split(
    "in `packages/push/test/counterparts/`:",
  );
  const rows = list.split("\n").filter((line) => /^\| (?!part |-)/.test(line));
  const names = rows.map((row) => row.split(" | ").at(-1)?.replace(/ *\|$/, "").trim() ?? "");
  expect(names).toHaveLength(30);
  expect(new Set(names).size).toBe(30);
  expect(names.filter((name) => !tests.includes(name))).toEqual([]);
});
