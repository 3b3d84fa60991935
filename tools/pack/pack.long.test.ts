// A long suite: packs each package and installs it elsewhere; lint:packages checks what each
// exports.

import { readdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { run } from "../release/tree.js";
import { compile, npmProject, twoAtATime } from "./outside.js";
import { isForPlatform, manifests, packAll, vitestVersion } from "./tarballs.js";

// Each package as published: packed, installed into an empty project outside the repository,
// imported, type-checked.
const names = [...manifests.keys()].filter((name) => !isForPlatform(name));
/** Programs that a package starts in a process of their own. An import would run them. */
const CHILD_PROGRAMS = /^\.\/(child|probe|probe-child)$/;
const needsVitest = (name: string) =>
  manifests.get(name)?.peerDependencies?.["vitest"] !== undefined;

const work = scratchFolder();
let projects: ReadonlyMap<string, Promise<string>> = new Map();

beforeAll(async () => {
  const tarballs = await packAll(join(work, "tarballs"));
  projects = twoAtATime(names, async (name) => {
    const folder = join(work, name.replace("/", "-"));
    const { peerDependencies = {}, devDependencies = {} } = manifests.get(name) ?? {};
    const dependencies: Record<string, string> = { [name]: "" };
    for (const peer of Object.keys(peerDependencies))
      dependencies[peer] = peer === "vitest" ? vitestVersion : (devDependencies[peer] ?? "");
    await npmProject({ folder, tarballs, dependencies });
    return folder;
  });
}, 300_000);

afterAll(async () => {
  await Promise.allSettled(projects.values());
});

describe.each(names)("%s", (name) => {
  test("packs, installs, imports and type-checks outside the repository", async () => {
    const folder = (await projects.get(name)) ?? "";
    const specifiers = Object.keys(manifests.get(name)?.exports ?? {})
      .filter((path) => !path.endsWith(".json") && !CHILD_PROGRAMS.test(path))
      .map((path) => name + path.slice(1));
    const imports = specifiers
      .map((specifier, i) => `import * as p${i} from ${JSON.stringify(specifier)};`)
      .join("\n");
    const uses = specifiers.map((_, i) => `Object.keys(p${i}).length`).join(", ");
    await writeFile(
      join(folder, "use.mts"),
      `${imports}\nexport const counts: number[] = [${uses}];\n`,
    );
    expect(compile(folder, ["use.mts"])).toEqual([]);
    if (needsVitest(name)) {
      // The suites can be imported only inside vitest.
      const test = `test("counts", () => { for (const count of [${uses}]) expect(count).toBeGreaterThan(0); });`;
      await writeFile(
        join(folder, "use.test.mjs"),
        `import { expect, test } from "vitest";\n${imports}\n${test}\n`,
      );
      await run(process.execPath, ["node_modules/vitest/vitest.mjs", "run"], { cwd: folder });
    } else {
      await writeFile(
        join(folder, "use.mjs"),
        `${imports}\nconsole.log(JSON.stringify([${uses}]));\n`,
      );
      const stdout = await run(process.execPath, ["use.mjs"], { cwd: folder });
      for (const count of JSON.parse(stdout) as number[]) expect(count).toBeGreaterThan(0);
    }
    const files = await readdir(join(folder, "node_modules", name), { recursive: true });
    expect(files.filter((path) => path.endsWith(".test.ts"))).toEqual([]);
  }, 240_000);
});
