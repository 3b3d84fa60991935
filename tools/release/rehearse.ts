// npm run release:rehearse [-- --out FOLDER]: a first and a second release on this host, from a
// copy of the checkout, to a registry on the loopback. It installs each package alone and runs its
// examples. With --out the tarballs of the first release are kept, to be published.
import { execFileSync } from "node:child_process";
import {
  cpSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { basename, join, resolve } from "node:path";
import { parseArgs } from "node:util";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { HOW_TOS, type HowTo, packageOf } from "../docs/how-to-pages.js";
import { buildImages } from "../images/build-image.js";
import { IMAGES } from "../images/containerfile.js";
import { twoAtATime } from "../pack/outside.js";
import { hasGo } from "../setup/go-tools.mjs";
import { runtimeProblems } from "../tested/runtimes.js";
import { auditProblems, scriptProblems } from "./audit.js";
import { pageProblems } from "./follow-pages.js";
import { licenseProblems, noticesOf, sbomOf, writeBundledNotices } from "./notices.js";
import { examineInstalled, installInto, installLineOf } from "./outside-install.js";
import { publishedPackages, readManifest, root } from "./packages.js";
import { provenanceOf } from "./provenance.js";
import { CONTAINER_NODE, containerNode, type Registry, startRegistry } from "./registry.js";
import { BREAKING, secondReleaseProblems } from "./second-release.js";
import { tarballLimitBytes, tarballProblems } from "./tarball-checks.js";
import { copyTree, pack, run } from "./tree.js";
import { applyChangesets, versionsOf, writePublishedReadmes } from "./versions.js";

/** What a package may install beside our own. */
const LIGHT: Readonly<Record<string, readonly string[]>> = {
  "@kv/interface": [],
  "@kv/topology": [],
  "@kv/plan": [],
};

const { values } = parseArgs({ options: { out: { type: "string" } } });
const work = mkdtempSync(join(tmpdir(), "kv-release-"));
const tree = join(work, "tree");
const problems: string[] = [];
const begunMs = Date.now();

const report = (subject: string, found: readonly string[]) =>
  problems.push(...found.map((each) => `${subject}: ${each}`));

async function step<T>(name: string, action: () => T | Promise<T>): Promise<T> {
  const stepMs = Date.now();
  const before = problems.length;
  const result = await action();
  const seconds = ((Date.now() - stepMs) / 1000).toFixed(0);
  console.log(`${problems.length === before ? "ok  " : "FAIL"}  ${name} (${seconds} s)`);
  for (const problem of problems.slice(before)) console.log(`      ${problem}`);
  return result;
}

async function packAndCheck(names: readonly string[], into: string): Promise<void> {
  const tarballs = await pack(tree, names, into);
  const order = names.map((name) => ({ name, file: basename(tarballs.get(name) ?? "") }));
  const versions = versionsOf(tree);
  writeFileSync(
    join(into, "order.json"),
    JSON.stringify(
      order.map((each) => ({ ...each, version: versions.get(each.name) })),
      undefined,
      2,
    ),
  );
  for (const [name, { folder, manifest }] of publishedPackages(tree)) {
    const tarball = tarballs.get(name);
    if (tarball === undefined) continue;
    const unpacked = unpackedFolder(name);
    rmSync(unpacked, { recursive: true, force: true });
    mkdirSync(unpacked, { recursive: true });
    execFileSync("tar", ["-xf", tarball, "-C", unpacked, "--strip-components", "1"]);
    const { length } = readFileSync(tarball);
    const limit = tarballLimitBytes(manifest);
    report(name, tarballProblems(unpacked, folder, { addons: true }));
    report(name, length > limit ? [`its tarball has ${length} bytes, more than ${limit}`] : []);
  }
}

/** Lists every file of a release with its digest: nothing else is published. */
async function writeProvenance(folder: string): Promise<void> {
  const repository = readManifest(root).repository?.url ?? "";
  const provenance = await provenanceOf(folder, { repository, checkout: root });
  writeFileSync(join(folder, "provenance.json"), JSON.stringify(provenance, undefined, 2));
}

const unpackedFolder = (name: string) => join(work, "unpacked", name);

const publish = (folder: string, { npmrc }: Registry) =>
  run(
    process.execPath,
    [join(root, "tools/release/release-publish.mjs"), folder, `--userconfig=${npmrc}`],
    {
      cwd: work,
    },
  );

/** The lowest version that each range of our packages accepts, by third-party package. */
const lowest = () =>
  Object.fromEntries(
    [...publishedPackages(tree).values()]
      .flatMap(({ manifest }) => Object.entries({ ...manifest.dependencies }))
      .filter(([name]) => !name.startsWith("@kv/"))
      .map(([name, range]) => [name, range.replace(/^[\^~]/, "")]),
  );

async function installAlone(
  name: string,
  registry: Registry,
  nodes: readonly string[],
): Promise<void> {
  const line = await installLineOf(unpackedFolder(name));
  const base = join(work, "alone", name);
  const nixl = nixlMissing === undefined;
  const ways = [
    { way: "npm", manager: "npm" },
    { way: "pnpm", manager: "pnpm" },
    { way: "lowest", manager: "npm", overrides: lowest() },
  ] as const;
  for (const { way, ...options } of ways) {
    const folder = join(base, way);
    const subject = `${name} (${way})`;
    try {
      await installInto(line, { folder, registry, ...options });
      report(subject, await examineInstalled(name, folder, { nodes, nixl }));
    } catch (error) {
      report(subject, [(error as Error).message]);
    }
  }
}

const upstream = execFileSync("npm", ["config", "get", "registry"], {
  cwd: tmpdir(),
  encoding: "utf8",
}).trim();
const unaudited: string[] = [];

/** A package and its peers, without what its example needs beside: SBOM, licenses, notices. */
async function examineDependencies(name: string, registry: Registry): Promise<void> {
  const peers = Object.keys(readManifest(unpackedFolder(name)).peerDependencies ?? {});
  const line = await installLineOf(unpackedFolder(name));
  const own = line.filter(
    (each) => each === name || peers.some((peer) => each.startsWith(`${peer}@`)),
  );
  const folder = join(work, "own", name);
  await installInto(own, { folder, registry, manager: "npm" });
  const sbom = await sbomOf(folder);
  report(name, licenseProblems(sbom));
  report(name, await scriptProblems(folder));
  const known = await auditProblems(folder, upstream);
  if (known === undefined) unaudited.push(name);
  else report(name, known);
  const short = name.replace("/", "-").slice(1);
  writeFileSync(join(work, "materials", `${short}.cdx.json`), JSON.stringify(sbom, undefined, 2));
  writeFileSync(join(work, "materials", `${short}.notices.md`), noticesOf(folder, sbom));
  const allowed = LIGHT[name];
  if (allowed === undefined) return;
  const installed = sbom.components
    .map((each) => each.name)
    .filter((each) => !each.startsWith("@kv/"));
  const heavy = installed.filter((each) => !allowed.includes(each));
  report(
    name,
    heavy.map((each) => `installs ${each}`),
  );
}

const allOf = <T>(items: readonly T[], action: (item: T) => Promise<void>) =>
  Promise.all(twoAtATime(items, action).values());

/** Outside of the repository, then with the reference app. */
async function followHowTo({ page, module, demo }: HowTo, { npmrc }: Registry): Promise<void> {
  const folder = join(work, "how-to", page);
  try {
    cpSync(packageOf(page), folder, { recursive: true });
    cpSync(npmrc, join(folder, ".npmrc"));
    for (const command of ["install --no-audit --no-fund", "run build", "test"])
      await run("npm", command.split(" "), { cwd: folder });
    const shared = join(folder, "shared");
    mkdirSync(shared);
    const own = demo(join(folder, `dist/${module}.js`), shared);
    const transport = own.includes("--transport-module") ? [] : ["--transport", "memory"];
    const program = join(root, "apps/demo/dist/main.js");
    // Its exit status says whether every token and every byte is right.
    await run(process.execPath, [program, ...transport, ...own], { cwd: folder });
  } catch (error) {
    report(`docs/how-to/${page}.md`, [(error as Error).message]);
  }
}

async function secondRelease(registry: Registry): Promise<void> {
  const before = versionsOf(tree);
  writeFileSync(
    join(tree, ".changeset/breaking.md"),
    `---\n"${BREAKING.name}": minor\n---\n\n${BREAKING.summary}\n`,
  );
  const after = await applyChangesets(tree);
  report("second release", secondReleaseProblems(tree, { before, after }));
  const changed = [...publishedPackages(tree).keys()].filter(
    (name) => before.get(name) !== after.get(name),
  );
  const into = join(work, "second");
  await packAndCheck(changed, into);
  await writeProvenance(into);
  await publish(into, registry);
  // What was not released fits both versions.
  for (const [name, version, expected] of [
    ["@kv/plan", before.get("@kv/plan"), before.get(BREAKING.name)],
    ["@kv/plan", after.get("@kv/plan"), after.get(BREAKING.name)],
    ["@kv/peer", after.get("@kv/peer"), after.get(BREAKING.name)],
  ] as const) {
    const folder = join(work, "second-installs", `${name.replace("/", "-")}-${version}`);
    await installInto([`${name}@${version}`], { folder, registry, manager: "npm" });
    const { version: actual } = readManifest(join(folder, "node_modules", BREAKING.name));
    const nested = (await sbomOf(folder)).components.filter(
      (each) => each.name === BREAKING.name,
    ).length;
    if (actual !== expected)
      report(`${name}@${version}`, [`installs ${BREAKING.name} ${actual}, not ${expected}`]);
    if (nested !== 1)
      report(`${name}@${version}`, [`installs ${nested} copies of ${BREAKING.name}`]);
  }
}

try {
  mkdirSync(join(work, "materials"));
  const first = join(work, "first");
  await step("a copy of the checkout", () => copyTree(tree));
  const pending = readdirSync(join(tree, ".changeset")).filter((name) => name.endsWith(".md"));
  if (values.out !== undefined && pending.length > 0)
    throw new Error(`${pending.length} changesets wait; apply them first: npm run release:version`);
  await step("versions and CHANGELOGs", () =>
    pending.length > 0 ? applyChangesets(tree) : versionsOf(tree),
  );
  await step("tarballs: complete, glibc, licenses, sizes", async () => {
    writePublishedReadmes(tree);
    writeBundledNotices(tree);
    await packAndCheck([...publishedPackages(tree).keys()], first);
  });
  await step("container images", async () => {
    mkdirSync(join(first, "images"));
    await buildImages(
      IMAGES.map(({ name }) => name),
      join(first, "images"),
      () => {},
    );
  });
  if (hasGo())
    await step("the Helm chart", async () => {
      const args = [join(root, "tools/deploy/chart.mjs"), join(work, "chart")];
      const archive = (await run(process.execPath, args, { cwd: root })).trim();
      cpSync(archive, join(first, "chart", basename(archive)));
    });
  else console.log("SKIPPED  the Helm chart: Go is missing, which builds kustomize");
  await step("provenance", () => writeProvenance(first));
  const newest = await step(`Node ${CONTAINER_NODE}`, containerNode);
  await using registry = await step("the registry", () => startRegistry(join(work, "registry")));
  await step("publish", () => publish(first, registry));
  const alone = [...publishedPackages(tree)].filter(
    ([, { manifest }]) => manifest.cpu === undefined,
  );
  if (nixlMissing !== undefined) console.log(`SKIPPED  the examples of @kv/nixl: ${nixlMissing}`);
  await step("each package alone: npm, pnpm, lowest versions, Node 20 and the newest", () =>
    allOf(alone, ([name]) => installAlone(name, registry, [process.execPath, newest])),
  );
  if (nixlMissing === undefined)
    await step("@kv/nixl in Node 20, 22, 24 and 26, Bun and Deno", () =>
      report("runtimes", runtimeProblems()),
    );
  if (nixlMissing === undefined)
    await step("bundles of @kv/nixl, alone in a folder", async () => {
      const test = ["node_modules/vitest/vitest.mjs", "run", "tools/pack/bundlers.long.test.ts"];
      await run(process.execPath, test, { cwd: root }).catch((error: Error) =>
        report("bundles", [error.message]),
      );
    });
  await step("what each package installs: SBOM, licenses, notices, audit", () =>
    allOf(alone, ([name]) => examineDependencies(name, registry)),
  );
  if (unaudited.length > 0)
    console.log(`SKIPPED  npm audit of ${unaudited.length} packages: the registry serves none`);
  await step("the how-tos: built outside, run in the reference app behind the proxy", () =>
    allOf(HOW_TOS, (howTo) => followHowTo(howTo, registry)),
  );
  await step("each page that begins with an install, from an empty folder", async () =>
    report("page", await pageProblems(join(work, "pages"), { nixl: nixlMissing === undefined })),
  );
  await step("a second release with a breaking change", () => secondRelease(registry));
  if (values.out !== undefined && problems.length === 0) {
    cpSync(first, resolve(values.out), { recursive: true });
    cpSync(join(work, "materials"), resolve(values.out, "materials"), { recursive: true });
  }
} finally {
  rmSync(work, { recursive: true, force: true });
}
console.log(`${problems.length} problems in ${((Date.now() - begunMs) / 1000).toFixed(0)} s`);
process.exitCode = problems.length === 0 ? 0 : 1;
