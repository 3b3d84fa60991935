// npm run build:platforms [-- --platform linux-x64-gnu]: builds the addons of @kv/nixl and
// @kv/neuron with Zig against glibc 2.28, for x64 and arm64, and packs them with @kv/nixl into
// native/build/packages. This machine's compiler and libraries do not affect the result.
import { mkdirSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { parseArgs } from "node:util";
import { compile, nativeRoot, run } from "./compile.mjs";
import { elfNeeds, violations } from "./elf-needs.mjs";
import { nixlPackages, pack } from "./pack.mjs";
import {
  addonsFor,
  EXPORTS,
  exportMap,
  GLIBC,
  isBuilt,
  link,
  markBuilt,
  PLATFORMS,
  sourcesDigest,
} from "./platform-packages.mjs";
import { zig } from "./zig.mjs";

/** Throws when the addon would not load on every Linux with that glibc. */
async function build(addon, { compiler, env }) {
  const { name, platform, folder, flags, linkFlags, file } = addon;
  process.stderr.write(`${name}: for ${platform.target}\n`);
  const work = join(nativeRoot, "build", `work-${name}-${platform.name}-${process.pid}`);
  const [map, built] = ["exports.map", "addon"].map((path) => join(work, path));
  const digest = sourcesDigest(addon);
  mkdirSync(work, { recursive: true });
  mkdirSync(dirname(file), { recursive: true });
  try {
    writeFileSync(map, exportMap());
    const command = [...compiler, "-target", platform.target];
    const objects = await compile(command, flags, { sources: folder, work, env });
    await run([...command, ...linkFlags, ...objects, ...link(map), "-o", built], { env });
    const problems = violations(elfNeeds(built), { glibc: GLIBC, exported: EXPORTS });
    if (problems.length > 0)
      throw new Error(`${name} for ${platform.name} ${problems.join("; it ")}`);
    // Units compiled against different headers must not be linked together.
    if (sourcesDigest(addon) !== digest)
      throw new Error("a source changed during the build; run it again");
    renameSync(built, file);
    markBuilt(addon);
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

try {
  const platforms = asked();
  const outdated = platforms.flatMap(addonsFor).filter((addon) => !isBuilt(addon));
  const tools = outdated.length === 0 ? undefined : await zig();
  for (const addon of outdated) await build(addon, tools);
  const packed = pack([...platforms.map(({ name }) => `@kv/nixl-${name}`), ...nixlPackages()]);
  process.stdout.write(`${packed.join("\n")}\n`);
} catch (error) {
  console.error(`kv_nixl: ${error.message}`);
  process.exit(1);
}
