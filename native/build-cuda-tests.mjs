// What the tests of device memory load: a way to the driver's memory, and a stand-in for the driver. Nothing is linked of NVIDIA's.
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { buildSingles } from "./build-singles.mjs";

const build = join(dirname(fileURLToPath(import.meta.url)), "build");
const TARGETS = [
  { sources: ["fake/cuda/memory_addon.cc"], output: join(build, "kv_cuda_memory.node") },
  {
    sources: ["fake/cuda/driver.cc"],
    output: join(build, "libfake_cuda.so"),
    // The name that the loader knows the driver by, once it is loaded.
    link: ["-Wl,-soname,libcuda.so.1"],
  },
];

/** Throws when the compiler fails. */
export const buildCudaTests = (compiler, options) => buildSingles(compiler, TARGETS, options);
