// Libraries of one unit each: @kv/neuron's addon, and what only tests load. They link nothing of
// AWS's or NVIDIA's.
import { spawnSync } from "node:child_process";
import { mkdirSync, renameSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { COMMON_FLAGS, NODE_API_FLAGS, nativeRoot } from "./compile.mjs";

const FLAGS = [
  ...COMMON_FLAGS,
  "-O2",
  ...NODE_API_FLAGS,
  ..."-shared -Wl,-z,nodelete -Wl,--as-needed -static-libstdc++ -static-libgcc".split(" "),
];

const TARGETS = [
  {
    source: "neuron/addon.cc",
    output: "../packages/neuron/native/linux-x64/kv_neuron.node",
  },
  { source: "fake/neuron/nrt.cc", output: "build/libfake_nrt.so" },
  {
    source: "fake/cuda/driver.cc",
    // Tests load this addon by path. The addon of @kv/nixl then finds it by its soname.
    output: "build/fake_cuda.node",
    link: ["-Wl,-soname,libcuda.so.1"],
  },
];

/** Throws when the compiler fails. */
export function buildSingleUnitLibraries(compiler) {
  for (const { source, output, link = [] } of TARGETS) {
    const library = join(nativeRoot, output);
    mkdirSync(dirname(library), { recursive: true });
    const work = `${library}.${process.pid}`;
    const unit = join(nativeRoot, source);
    const { status } = spawnSync(compiler, [unit, ...FLAGS, ...link, "-o", work, "-ldl"], {
      stdio: "inherit",
    });
    if (status !== 0) throw new Error(`${compiler} failed on ${source}`);
    renameSync(work, library);
    process.stderr.write(`native: built ${relative(dirname(nativeRoot), library)}\n`);
  }
}
