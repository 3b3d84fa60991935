// A long suite: packs the core and installs it elsewhere.

import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, expect, test } from "vitest";
import { readManifest, root } from "../release/packages.js";
import { run } from "../release/tree.js";
import { npmProject } from "./outside.js";
import { packAll, vitestVersion } from "./tarballs.js";

// An author's new project: vitest as it is set by default, and the compiler with `strict` alone.
const SUITES = `
import { engineSuite } from "@kv/conformance/engine";
import { platformSuite } from "@kv/conformance/platform";
import { transportSuite } from "@kv/conformance/transport";
import { cpuPlatform, createWorkerOutputAggregator, staged } from "@kv/connector";
import { pullConnector } from "@kv/pull";
import { memoryTransport, sceneNetwork } from "@kv/transport-memory";

transportSuite({ name: "memory", create: async () => memoryTransport() });
platformSuite({ name: "cpu", create: cpuPlatform });
engineSuite({
  name: "pull",
  connector: pullConnector,
  createNetwork: sceneNetwork,
  createWorkerOutputAggregator,
  stage: (options) => staged(pullConnector, options),
  without: ["early"],
});
`;

const work = scratchFolder();
let folder = "";

beforeAll(async () => {
  folder = join(work, "author");
  const { devDependencies = {} } = readManifest(root);
  await npmProject({
    folder,
    tarballs: await packAll(join(work, "tarballs")),
    dependencies: {
      "@kv/conformance": "",
      "@kv/connector": "",
      "@kv/interface": "",
      "@kv/pull": "",
      "@kv/transport-memory": "",
      "@types/node": devDependencies["@types/node"] ?? "",
      typescript: devDependencies.typescript ?? "",
      vitest: vitestVersion,
    },
  });
  await writeFile(join(folder, "suites.test.ts"), SUITES);
}, 300_000);

test("the suites compile under tsc --strict, with every declaration that they import checked", async () => {
  const flags = ["--strict", "--noEmit", "--module", "nodenext", "--target", "es2022"];
  const found = await run("npx", ["tsc", ...flags, "suites.test.ts"], { cwd: folder });
  expect(found).toBe("");
}, 240_000);

test("the suites pass in a new project, with vitest's own time limits", async () => {
  const said = await run("npx", ["vitest", "run"], { cwd: folder });
  expect(said).toMatch(/\d+ passed/);
}, 240_000);
