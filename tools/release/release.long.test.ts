// A long suite: packs all packages, and unpacks them.

import { execFileSync } from "node:child_process";
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, describe, expect, test } from "vitest";
import { commonFields } from "./metadata.js";
import { licenseProblems, writeBundledNotices } from "./notices.js";
import { type PublishedPackage, publishedPackages, readManifest, root } from "./packages.js";
import { BREAKING, secondReleaseProblems } from "./second-release.js";
import { tarballProblems } from "./tarball-checks.js";
import { copyTree, pack } from "./tree.js";
import { applyChangesets, versionsOf, writePublishedReadmes } from "./versions.js";

// The short form of `npm run release:rehearse`: without a registry and without the addons.
const UNRELEASED = "0.0.0";
const packages = publishedPackages();

const work = scratchFolder();
let tree = "";

beforeAll(async () => {
  tree = join(work, "tree");
  await copyTree(tree);
}, 240_000);

describe.each([...packages])("%s", (name, { folder, manifest }: PublishedPackage) => {
  test("has the repository's metadata, and keywords", () => {
    expect(manifest).toMatchObject(commonFields(folder));
    expect(manifest.keywords?.length).toBeGreaterThan(0);
  });

  test.skipIf(manifest.version !== UNRELEASED)(
    "is described by one changeset before its first release",
    () => {
      const changesets = readdirSync(join(root, ".changeset"))
        .filter((file) => file.endsWith(".md"))
        .filter((file) =>
          readFileSync(join(root, ".changeset", file), "utf8").includes(`"${name}":`),
        );
      expect(changesets).toHaveLength(1);
    },
  );

  test("accepts ranges of the packages of others", () => {
    const { dependencies = {} } = manifest;
    const exact = Object.entries(dependencies).filter(([, range]) =>
      /^(workspace:\*|\d)/.test(range),
    );
    expect(exact).toEqual([]);
  });
});

test("every license of an expression must be allowed; those of NIXL's libraries are so in their package only", () => {
  const component = (name: string, expression: string) => ({
    name,
    version: "1.0.0",
    licenses: [{ expression }],
  });
  const components = [
    component("one", "MIT AND BSD-3-Clause"),
    component("@kv/nixl-libs-linux-x64-gnu", "Apache-2.0 AND BSL-1.0 AND LGPL-2.1-or-later"),
    component("two", "MIT AND LGPL-2.1-or-later"),
    { name: "three", version: "1.0.0" },
  ];
  expect(licenseProblems({ bomFormat: "CycloneDX", components })).toEqual([
    "two 1.0.0 has the license MIT AND LGPL-2.1-or-later",
    "three 1.0.0 has the license unknown",
  ]);
});

describe("two releases of a copy", { timeout: 240_000 }, () => {
  test("the first release has version 0.1.0 and one entry for each package, and none for private ones", async () => {
    const before = versionsOf(tree);
    const after = await applyChangesets(tree);
    for (const [name, version] of after) {
      if (before.get(name) !== UNRELEASED) continue;
      expect(`${name} ${version}`).toBe(`${name} 0.1.0`);
      const changelog = readFileSync(
        join(tree, packages.get(name)?.folder ?? "", "CHANGELOG.md"),
        "utf8",
      );
      expect(changelog.match(/^- .*$/gm)).toEqual([expect.stringMatching(/^- First release\. /)]);
    }
    const privates = ["apps/demo", "native", "tools", "tools/testing"];
    expect(privates.filter((folder) => existsSync(join(tree, folder, "CHANGELOG.md")))).toEqual([]);
  });

  test("no tarball is hollow", async () => {
    writePublishedReadmes(tree);
    writeBundledNotices(tree);
    const into = join(work, "tarballs");
    mkdirSync(into);
    const tarballs = await pack(tree, [...packages.keys()], into);
    const problems = [...tarballs].flatMap(([name, tarball]) => {
      const unpacked = join(work, "unpacked", name);
      mkdirSync(unpacked, { recursive: true });
      execFileSync("tar", ["-xf", tarball, "-C", unpacked, "--strip-components", "1"]);
      const found = tarballProblems(unpacked, packages.get(name)?.folder ?? "", { addons: false });
      return found.map((problem) => `${name}: ${problem}`);
    });
    expect(problems).toEqual([]);
  });

  test("a tarball without its declarations, with an install script or with an exact range is refused", () => {
    const unpacked = join(work, "unpacked/@kv/topology");
    rmSync(join(unpacked, "dist/index.d.ts"));
    const manifest = readManifest(unpacked);
    writeFileSync(
      join(unpacked, "package.json"),
      JSON.stringify({
        ...manifest,
        scripts: { postinstall: "x" },
        dependencies: { "@kv/interface": "0.1.0" },
      }),
    );
    expect(tarballProblems(unpacked, "packages/topology", { addons: false })).toEqual([
      "has no ./dist/index.d.ts",
      "runs postinstall when it is installed",
      "depends on @kv/interface 0.1.0",
    ]);
  });

  test("a breaking change gives its package a minor version, and its dependents the new range and a patch version", async () => {
    const before = versionsOf(tree);
    writeFileSync(
      join(tree, ".changeset/breaking.md"),
      `---\n"${BREAKING.name}": minor\n---\n\n${BREAKING.summary}\n`,
    );
    const after = await applyChangesets(tree);
    expect(secondReleaseProblems(tree, { before, after })).toEqual([]);
    expect(secondReleaseProblems(tree, { before: after, after })).not.toEqual([]);
  });
});
