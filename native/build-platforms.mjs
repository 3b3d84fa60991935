// npm run build:platforms: the packages that carry the addon, for x64 and arm64, each built for glibc 2.28 with Zig, checked, and packed into
// native/build/packages together with @kv/nixl. Nothing but their own files depends on the machine that runs this.
import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { compile, here, run } from "./compile.mjs";
import { complaints, elfNeeds } from "./elf-needs.mjs";
import {
  addonOf,
  digestFor,
  EXPORTS,
  exportMap,
  flags,
  GLIBC,
  isCurrent,
  link,
  markMade,
  PLATFORMS,
} from "./platform-packages.mjs";
import { zig } from "./zig.mjs";

async function build(platform, { compiler, env }) {
  const work = join(here, "build", `work-${platform.name}-${process.pid}`);
  const map = join(work, "exports.map");
  const digest = digestFor(platform);
  mkdirSync(work, { recursive: true });
  try {
    writeFileSync(map, exportMap());
    const command = [...compiler, "-target", platform.target];
    const objects = await compile(command, flags, work, env);
    await run([...command, ...objects, ...link(map), "-o", join(work, "addon")], { env });
    const wrong = complaints(elfNeeds(join(work, "addon")), { glibc: GLIBC, exported: EXPORTS });
    if (wrong.length > 0) throw new Error(`the addon for ${platform.name} ${wrong.join("; it ")}`);
    // Units that saw different headers do not fit together.
    if (digestFor(platform) !== digest) throw new Error("a source has changed meanwhile; build it again");
    renameSync(join(work, "addon"), addonOf(platform));
    markMade(platform, digest);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}

function pack() {
  const root = join(here, "..");
  const into = join(here, "build", "packages");
  rmSync(into, { recursive: true, force: true });
  mkdirSync(into, { recursive: true });
  const { packageManager } = JSON.parse(readFileSync(join(root, "package.json"), "utf8"));
  const places = ["./native/npm/*", "@kv/nixl", "@kv/interface"].flatMap((place) => ["--filter", place]);
  const args = ["--yes", packageManager, "--recursive", ...places, "pack", "--pack-destination", into];
  const { status } = spawnSync("npx", args, { cwd: root, stdio: ["ignore", "inherit", "inherit"] });
  if (status !== 0) throw new Error(`packing ended with ${status}`);
}

try {
  const tools = PLATFORMS.every(isCurrent) ? undefined : await zig();
  for (const platform of PLATFORMS) {
    if (isCurrent(platform)) continue;
    process.stderr.write(`kv_nixl: for ${platform.target}\n`);
    await build(platform, tools);
  }
  pack();
} catch (error) {
  console.error(`kv_nixl: ${error.message}`);
  process.exit(1);
}
