// The libraries that consist of one unit: the addon of @kv/neuron, and what only tests load. Nothing of AWS's or NVIDIA's is linked.
import { spawnSync } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { COMMON_FLAGS, digestOf, NODE_API_FLAGS, nativeRoot } from "./compile.mjs";

const FLAGS = [
  ...COMMON_FLAGS,
  "-O2",
  ...NODE_API_FLAGS,
  ..."-shared -Wl,-z,nodelete -Wl,--as-needed -static-libstdc++ -static-libgcc".split(" "),
];

/** `sources`: the unit, then the headers that it depends on. */
const TARGETS = [
  {
    sources: ["neuron/addon.cc", "neuron/nrt_api.h"],
    output: "../packages/neuron/native/linux-x64/kv_neuron.node",
  },
  { sources: ["fake/neuron/nrt.cc"], output: "build/libfake_nrt.so" },
  {
    sources: ["fake/cuda/driver.cc"],
    // An addon, so that a test loads it by its path. The addon of @kv/nixl finds a driver that is loaded by this name.
    output: "build/fake_cuda.node",
    link: ["-Wl,-soname,libcuda.so.1"],
  },
];

/** Builds each library whose source, flags or compiler changed; with `force`, all. Throws when the compiler fails. */
export function buildSingleUnitLibraries(compiler, { force }) {
  for (const { sources, output, link = [] } of TARGETS) {
    const files = sources.map((source) => join(nativeRoot, source));
    const library = join(nativeRoot, output);
    const digest = digestOf([compiler, FLAGS, link, process.arch], files);
    const stamp = join(nativeRoot, "build", `${sources[0].replaceAll("/", "-")}.digest`);
    const fresh = existsSync(library) && existsSync(stamp) && readFileSync(stamp, "utf8") === digest;
    if (fresh && !force) continue;
    mkdirSync(dirname(library), { recursive: true });
    mkdirSync(dirname(stamp), { recursive: true });
    const work = `${library}.${process.pid}`;
    const { status } = spawnSync(compiler, [files[0], ...FLAGS, ...link, "-o", work, "-ldl"], {
      stdio: "inherit",
    });
    if (status !== 0) throw new Error(`${compiler} failed on ${sources[0]}`);
    renameSync(work, library);
    writeFileSync(stamp, digest);
    process.stderr.write(`native: built ${relative(dirname(nativeRoot), library)}\n`);
  }
}
