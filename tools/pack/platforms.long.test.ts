// A long suite: installs the packages of all platforms.

import { execFileSync } from "node:child_process";
import { existsSync } from "node:fs";
import { copyFile, cp, mkdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, describe, expect, test } from "vitest";
import { elfNeeds, violations } from "../../native/scripts/elf-needs.mjs";
import { LIBS } from "../../native/scripts/nixl-libs.mjs";
import {
  addonOf,
  EXPORTS,
  GLIBC,
  isCurrent,
  PLATFORMS,
} from "../../native/scripts/platform-packages.mjs";
import { addonPath, loadAddon } from "../../packages/nixl/src/addon/load-addon.js";
import { root } from "../release/packages.js";
import { pnpm, run } from "../release/tree.js";
import { npmProject } from "./outside.js";
import { isForPlatform, manifests, packAll } from "./tarballs.js";

// The platform packages with the addon, and a user's path from the tarballs to a transfer.
const promised = { glibc: GLIBC, exported: EXPORTS };

test("every platform has a package that declares its platform and has no install script", () => {
  const nixl = manifests.get("@kv/nixl");
  const named = [
    ...PLATFORMS.map(({ name }) => `@kv/nixl-${name}`),
    ...LIBS.map(({ name }) => name),
  ];
  expect([...manifests.keys()].filter(isForPlatform).sort()).toEqual([...named].sort());
  expect(Object.keys(nixl?.optionalDependencies ?? {}).sort()).toEqual([...named].sort());
  for (const name of named) {
    const cpu = /linux-(\w+)-gnu/.exec(name)?.[1];
    expect(manifests.get(name)).toMatchObject({
      version: nixl?.version,
      os: ["linux"],
      cpu: [cpu],
      libc: ["glibc"],
    });
    expect(manifests.get(name)?.scripts).toBeUndefined();
  }
});

test("an addon that needs a newer glibc or a C++ runtime, or that waits by the clock of the day, is rejected", () => {
  const good = {
    libraries: ["libc.so.6", "ld-linux-aarch64.so.1"],
    versions: ["GLIBC_2.2.5", "GLIBC_2.28"],
    imports: ["pthread_cond_timedwait", "pthread_condattr_setclock"],
    exports: EXPORTS,
  };
  expect(violations(good, promised)).toEqual([]);
  expect(violations({ ...good, imports: ["pthread_cond_timedwait"] }, promised)).toEqual([
    "waits by the clock of the day, which can be set back",
  ]);
  expect(violations({ ...good, versions: ["GLIBC_2.29"] }, promised)).toHaveLength(1);
  expect(violations({ ...good, versions: ["GLIBC_3.0", "GLIBCXX_3.4.30"] }, promised)).toHaveLength(
    2,
  );
  expect(violations({ ...good, libraries: ["libstdc++.so.6"] }, promised)).toHaveLength(1);
  expect(violations({ ...good, exports: ["__cxa_throw"] }, promised)).toHaveLength(1);
});

describe.each(PLATFORMS)("$name", (platform) => {
  test.skipIf(!isCurrent(platform))(
    "the addon of npm run build:platforms needs no newer glibc and no C++ runtime",
    () => {
      expect(violations(elfNeeds(addonOf(platform)), promised)).toEqual([]);
    },
  );
});

// In CI `npm test` builds the platform packages first, so every suite runs with the addon that is
// published.
test.runIf(process.env.CI === "true")("CI runs with the addon of the platform package", () => {
  const platform = PLATFORMS.find(({ name }) => name === `linux-${process.arch}-gnu`);
  if (platform === undefined) throw new Error(`no platform package for ${process.arch}`);
  expect(isCurrent(platform)).toBe(true);
  if (process.env.KV_NIXL_ADDON) return;
  loadAddon();
  expect(addonPath()).toBe(addonOf(platform));
});

const here = PLATFORMS.find(({ name }) => name === `${process.platform}-${process.arch}-gnu`);
const cannot = here === undefined ? "no package for this platform" : nixlMissing;

describe.skipIf(cannot)(`from the tarballs to a transfer (${cannot ?? "NIXL found"})`, () => {
  const work = scratchFolder();
  let folder = "";

  beforeAll(async () => {
    if (here === undefined) return;
    const tarballs = new Map(await packAll(join(work, "tarballs")));
    const name = `@kv/nixl-${here.name}`;
    // Where build:platforms has not run, the repository's own build is packed.
    if (!existsSync(addonOf(here))) tarballs.set(name, await packedWithSourceBuild(here.folder));
    folder = join(work, "user");
    await npmProject({ folder, tarballs, dependencies: { "@kv/nixl": "" } });
  }, 300_000);

  async function packedWithSourceBuild(from: string): Promise<string> {
    const copy = join(work, "platform");
    await cp(from, copy, { recursive: true });
    await copyFile(join(root, "native/build/kv_nixl.node"), join(copy, "kv_nixl.node"));
    await mkdir(join(work, "own"));
    const stdout = await pnpm(["pack", "--json", "--pack-destination", join(work, "own")], copy);
    return (JSON.parse(stdout) as { filename: string }).filename;
  }

  test("the tarball of @kv/nixl depends on exact versions", () => {
    const packed = execFileSync("tar", [
      "-xOf",
      join(work, "tarballs", tarballName()),
      "package/package.json",
    ]);
    const { optionalDependencies, version } = JSON.parse(packed.toString()) as {
      optionalDependencies: Record<string, string>;
      version: string;
    };
    expect(new Set(Object.values(optionalDependencies))).toEqual(new Set([version]));
  });
  const tarballName = () => `kv-nixl-${manifests.get("@kv/nixl")?.version}.tgz`;

  test("the addon is loaded from the platform package, and the README's example moves bytes", async () => {
    const where = await run(
      process.execPath,
      [
        "--input-type=module",
        "--eval",
        'import { nixlTransport } from "@kv/nixl"; nixlTransport().allocate(1).close();' +
          'console.log((await import("node:fs")).readFileSync("/proc/self/maps", "utf8").match(/\\S+kv_nixl\\.node/)[0]);',
      ],
      { cwd: folder },
    );
    expect(where.trim()).toBe(join(folder, `node_modules/@kv/nixl-${here?.name}/kv_nixl.node`));

    const readme = await readFile(join(root, "packages/nixl/README.md"), "utf8");
    const [, example = ""] = /^```ts\n([\s\S]*?)^```$/m.exec(readme) ?? [];
    await writeFile(join(folder, "two.mjs"), example);
    const stdout = await run(process.execPath, ["two.mjs"], { cwd: folder });
    expect(stdout.trim().split("\n").sort()).toEqual([
      "owner: notified of read",
      "read 196608 bytes; the last byte is 7",
    ]);
  }, 120_000);
});
