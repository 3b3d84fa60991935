// npm run build:libs [-- --wheel FILE]: makes the package with NIXL's libraries from the pinned wheel, strips them, and packs it into
// native/build/packages. pip downloads the wheel once, into native/build; its SHA-256 is checked in both cases.
import { spawnSync } from "node:child_process";
import { copyFileSync, mkdirSync, readFileSync, renameSync, rmSync, statSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";
import { root, setup } from "../../scripts/setup.mjs";
import { nativeRoot, run } from "./compile.mjs";
import {
  bytesBelow,
  chosenFiles,
  INSTALLATION,
  LIBS_FOLDER,
  LIBS_PACKAGE,
  LIMITS,
  libsAreCurrent,
  libsDigest,
  libsStamp,
  withoutAttribution,
} from "./nixl-libs.mjs";

async function build(wheel) {
  await setup({ native: "none" });
  const { installNixl } = await import(pathToFileURL(join(root, "packages/nixl/dist/index.js")).href);
  const { folder } = await installNixl({
    wheel,
    environment: { ...process.env, XDG_CACHE_HOME: join(nativeRoot, "build") },
    onProgress: (line) => process.stderr.write(`${line}\n`),
  });
  if (basename(folder) !== INSTALLATION)
    throw new Error(`the wheel is ${basename(folder)}, not ${INSTALLATION}`);
  const files = chosenFiles(folder);
  const missing = withoutAttribution(files);
  if (missing.length > 0) throw new Error(`ATTRIBUTIONS.md does not name ${missing.join(", ")}`);

  const work = join(nativeRoot, "build", `work-libs-${process.pid}`);
  try {
    for (const file of files) {
      mkdirSync(dirname(join(work, file)), { recursive: true });
      copyFileSync(join(folder, file), join(work, file));
    }
    await run(["strip", "--strip-unneeded", ...files.map((file) => join(work, file))]);
    // A file that strip has damaged would need other libraries, or none.
    if (chosenFiles(work).join() !== files.join())
      throw new Error("strip has changed what the libraries need");
    rmSync(LIBS_FOLDER, { recursive: true, force: true });
    mkdirSync(dirname(LIBS_FOLDER), { recursive: true });
    renameSync(work, LIBS_FOLDER);
    writeFileSync(libsStamp, libsDigest());
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}

function pack() {
  const into = join(nativeRoot, "build", "packages");
  mkdirSync(into, { recursive: true });
  const { packageManager } = JSON.parse(readFileSync(join(root, "package.json"), "utf8"));
  const args = ["--yes", packageManager, "pack", "--json", "--pack-destination", into];
  const { status, stdout } = spawnSync("npx", args, {
    cwd: LIBS_PACKAGE,
    encoding: "utf8",
    stdio: ["ignore", "pipe", "inherit"],
  });
  if (status !== 0) throw new Error(`packing ended with ${status}`);
  return JSON.parse(stdout).filename;
}

try {
  const { wheel } = parseArgs({ options: { wheel: { type: "string" } } }).values;
  if (!libsAreCurrent()) await build(wheel);
  const tarball = pack();
  const sizes = { packed: statSync(tarball).size, unpacked: bytesBelow(LIBS_PACKAGE) };
  const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;
  process.stdout.write(`${tarball}: ${megabytes(sizes.packed)}, unpacked ${megabytes(sizes.unpacked)}\n`);
  for (const [name, limit] of Object.entries(LIMITS)) {
    if (sizes[name] > limit)
      throw new Error(`${name}: ${megabytes(sizes[name])} is more than ${megabytes(limit)}`);
  }
} catch (error) {
  console.error(`nixl libs: ${error.message}`);
  process.exit(1);
}
