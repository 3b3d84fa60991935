// A long suite: packs and installs packages as the command does.

import { cp, mkdir, readdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, expect, test } from "vitest";
import { root } from "../release/packages.js";
import { run } from "../release/tree.js";
import { packForInstall } from "./install.js";

// `npm run pack`, without the packages of native code: `npm run kv-nixl -- selftest` and
// `npm run release:rehearse` have those.
const work = scratchFolder();
beforeAll(async () => {});

test("first-contact.md 3: the line that it prints installs what an example needs, in an empty folder", async () => {
  const [tarballs, project] = [join(work, "tarballs"), join(work, "project")];
  const wanted = ["@kv/pull", "@kv/connector", "@kv/transport-memory"];
  const install = await packForInstall([...wanted, "--no-audit"], tarballs, () => {});
  expect(install).toBe(`npm install --no-audit ${join(tarballs, "*.tgz")}`);
  await mkdir(project);
  await writeFile(join(project, "package.json"), JSON.stringify({ private: true, type: "module" }));
  await run("bash", ["-c", `${install} --prefer-offline --no-fund`], { cwd: project });
  await cp(join(root, "examples/two-engines.mjs"), join(project, "two-engines.mjs"));
  const stdout = await run(process.execPath, ["two-engines.mjs"], { cwd: project });
  expect(stdout).toBe("D has 24576 bytes of KV, equal to P's\n");
  const installed = await readdir(join(project, "node_modules/@kv"));
  expect(installed).toEqual(
    expect.arrayContaining(["connector", "interface", "plan", "protocol", "pull"]),
  );
  expect(installed).not.toContain("nixl");
  await expect(packForInstall(["@kv/pull"], tarballs, () => {})).rejects.toThrow("is not empty");
}, 240_000);

test("a package that does not exist is refused with the names of those that do", async () => {
  await expect(packForInstall(["@kv/pul"], join(work, "none"), () => {})).rejects.toThrow(
    /^@kv\/pul: the packages are @kv\/conformance, @kv\/connector, .*@kv\/pull/,
  );
});
