import { spawn } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { bundled } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, expect, test } from "vitest";
import { prepareModel } from "./prepare-model.js";

const repository = fileURLToPath(new URL("../../../..", import.meta.url));

const cacheDirectory = scratchFolder();
beforeAll(() => prepareModel(undefined, { cacheDirectory }));

const step =
  "model.forward({ sequenceId: 'a', tokens: new Int32Array(1000).fill(7), position: 0 })";
// The pause lets the step begin before the process exits.
const later = (what: string) => `setTimeout(() => { ${what} }, 30);`;

test.each([
  ["process.exit while the model loads", later("process.exit(0)"), 0],
  [
    "process.exit in the middle of a step",
    `const model = await load(); void ${step}; ${later("process.exit(0)")}`,
    0,
  ],
  [
    "an uncaught error in a step",
    `const model = await load(); void ${step}; ${later("throw new Error('boom')")}`,
    1,
  ],
  ["process.exit between steps", `const model = await load(); await ${step}; process.exit(0);`, 0],
  ["close", `const model = await load(); void ${step}; await model.close();`, 0],
  [
    "two models, one closed",
    "const one = await load(); await load(); await one.close(); process.exit(0);",
    0,
  ],
])("%s ends the process with its own exit code", async (_, code, expected) => {
  const program = `
    import { loadModel } from "./model.ts";
    const load = () => loadModel({ cacheDirectory: ${JSON.stringify(cacheDirectory)} });
    ${code.includes("load()") ? "" : "void load();"}
    ${code}`;
  const child = spawn(process.execPath, [await bundled(fileURLToPath(import.meta.url), program)], {
    cwd: repository,
    stdio: ["ignore", "ignore", "pipe"],
  });
  let errors = "";
  child.stderr.on("data", (chunk) => {
    errors += chunk;
  });
  const [exitCode] = await once(child, "close");
  expect({ exitCode, errors: errors.includes("terminate called") ? errors : "" }).toEqual({
    exitCode: expected,
    errors: "",
  });
});
