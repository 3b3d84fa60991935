// npm run build:platforms [-- --platform linux-x64-gnu]: builds the addons of @kv/nixl and
// @kv/neuron for x64 and arm64, or for one platform, with Zig against glibc 2.28, checks what they
// need, and packs the platform packages and @kv/nixl into native/build/packages. The result does
// not depend on the compiler or libraries of this machine.
import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { compile, nativeRoot, run } from "./compile.mjs";
import { elfNeeds, violations } from "./elf-needs.mjs";
import { buildNeuronAddon, isNeuronCurrent } from "./neuron-addon.mjs";
import { nixlPackages } from "./nixl-packages.mjs";
import {
  addonOf,
  digestFor,
  EXPORTS,
  exportMap,
  flags,
  GLIBC,
  isCurrent,
  link,
  markBuilt,
  PLATFORMS,
} from "./platform-packages.mjs";
import { zig } from "./zig.mjs";

async function build(platform, { compiler, env }) {
  const work = join(nativeRoot, "build", `work-${platform.name}-${process.pid}`);
  const map = join(work, "exports.map");
  const digest = digestFor(platform);
  mkdirSync(work, { recursive: true });
  try {
    writeFileSync(map, exportMap());
    const command = [...compiler, "-target", platform.target];
    const objects = await compile(command, flags, { sources: "src", work, env });
    await run([...command, ...objects, ...link(map), "-o", join(work, "addon")], { env });
    const problems = violations(elfNeeds(join(work, "addon")), { glibc: GLIBC, exported: EXPORTS });
    if (problems.length > 0)
      throw new Error(`the addon for ${platform.name} ${problems.join("; it ")}`);
    // Units that were compiled against different headers must not be linked together.
    if (digestFor(platform) !== digest)
      throw new Error("a source changed during the build; run it again");
    renameSync(join(work, "addon"), addonOf(platform));
    markBuilt(platform, digest);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}

function asked() {
  const { values } = parseArgs({ options: { platform: { type: "string" } } });
  if (values.platform === undefined) return PLATFORMS;
  const platform = PLATFORMS.find(({ name }) => name === values.platform);
  if (platform !== undefined) return [platform];
  const names = PLATFORMS.map(({ name }) => name).join(", ");
  throw new Error(`--platform must be of ${names}, not ${values.platform}`);
}

function pack(platforms) {
  const root = join(nativeRoot, "..");
  const into = join(nativeRoot, "build", "packages");
  mkdirSync(into, { recursive: true });
  const { packageManager } = JSON.parse(readFileSync(join(root, "package.json"), "utf8"));
  const packages = platforms.map(({ name }) => `@kv/nixl-${name}`);
  const places = [...packages, ...nixlPackages()].flatMap((place) => ["--filter", place]);
  const args = [
    "--yes",
    packageManager,
    "--recursive",
    ...places,
    "pack",
    "--pack-destination",
    into,
  ];
  const { status } = spawnSync("npx", args, { cwd: root, stdio: ["ignore", "inherit", "inherit"] });
  if (status !== 0) throw new Error(`packing ended with ${status}`);
}

try {
  const platforms = asked();
  const current = (platform) => isCurrent(platform) && isNeuronCurrent(platform);
  const tools = platforms.every(current) ? undefined : await zig();
  for (const platform of platforms) {
    if (!isNeuronCurrent(platform)) await buildNeuronAddon(platform, tools);
    if (isCurrent(platform)) continue;
    process.stderr.write(`kv_nixl: for ${platform.target}\n`);
    await build(platform, tools);
  }
  pack(platforms);
} catch (error) {
  console.error(`kv_nixl: ${error.message}`);
  process.exit(1);
}
