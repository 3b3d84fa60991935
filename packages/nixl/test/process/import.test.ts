import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { run } from "../support/run-child.js";

const INDEX = new URL("../../dist/index.js", import.meta.url).href;
/** Prints each file that an import loads. */
const HOOKS = `export const load = (url, context, next) => {
  if (url.startsWith("file:")) process._rawDebug(url);
  return next(url, context);
};`;

test("F7: importing the package loads few files, and none of zod", async () => {
  const hooks = JSON.stringify(`data:text/javascript,${encodeURIComponent(HOOKS)}`);
  const script = `import { register } from "node:module"; register(${hooks}); await import(${JSON.stringify(INDEX)});`;
  const { code, stderr } = await run(["--input-type=module", "--eval", script]);
  expect(code, stderr).toBe(0);
  const loaded = stderr.split("\n").filter((line) => line.startsWith("file:"));
  expect(loaded).toContain(INDEX);
  expect(loaded.filter((url) => fileURLToPath(url).includes("/zod/"))).toEqual([]);
  expect(loaded.length).toBeLessThan(20);
});
