// The small addon of @kv/neuron, into its package, and the stand-in for libnrt that its tests load. Nothing is linked of AWS's.
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { buildSingles } from "./build-singles.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const TARGETS = [
  {
    sources: ["neuron/addon.cc", "neuron/nrt_api.h"],
    output: join(here, "../packages/neuron/native/linux-x64/kv_neuron.node"),
  },
  { sources: ["fake/fake_nrt.cc"], output: join(here, "build/libfake_nrt.so") },
];

/** Throws when the compiler fails. */
export const buildNeuron = (compiler, options) => buildSingles(compiler, TARGETS, options);
