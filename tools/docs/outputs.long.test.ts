// A long suite: runs the demo, whose output the pages show as pictures.
import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { builtProgram } from "@kv/testing/node-programs";
import { expect, test } from "vitest";
import { root } from "../repository/source-files.js";
import { expectShown } from "./expect-shown.js";
import { masked } from "./page-outputs.js";
import { picturesOf } from "./terminal.js";

// `npx vitest run tools/docs/outputs.long.test.ts -u` draws the pictures again.
test.skipIf(nixlMissing)("the pictures of the demo show what it prints", async () => {
  const { status, stdout, stderr } = spawnSync(process.execPath, [builtProgram("demo")], {
    cwd: root,
    encoding: "utf8",
  });
  expect(status, stderr).toBe(0);
  const lines = ["$ npm run demo", ...`${stderr}${stdout}`.trimEnd().split("\n")];
  for (const [name, drawn] of Object.entries(picturesOf(lines))) {
    const page = `docs/demo-${name}.svg`;
    await expectShown({ page, text: readFileSync(join(root, page), "utf8") }, drawn, masked);
  }
});
