import type { ChildOutcome } from "../child/child-process.js";
import type { PluginAnswer } from "./probes.js";
import type { Check } from "./report.js";

const PLUGIN_FILE = /^libplugin_([A-Za-z0-9_]+)\.so$/;

/** What a library that plugins ask for belongs to, and how one gets it. */
const LIBRARIES: readonly [pattern: RegExp, belongsTo: string, fix: string][] = [
  [
    /^libfabric\.so/,
    "libfabric",
    "npx --no-install kv-nixl install --with libfabric, or EFA's installer on EC2",
  ],
  [
    /^libhwloc\.so/,
    "hwloc",
    "npx --no-install kv-nixl install --with libfabric, or: apt-get install libhwloc15",
  ],
  [/^libcuda\.so/, "NVIDIA's driver", "a driver, on a machine with a GPU"],
  [
    /^libcudart\.so/,
    "the CUDA runtime",
    "python3 -m pip install nvidia-cuda-runtime-cu12, and its folder in LD_LIBRARY_PATH",
  ],
  [/^libcufile/, "GPUDirect Storage", "NVIDIA's CUDA toolkit"],
  [/^libred_client/, "DDN Infinia", "DDN's client"],
  [/^libdoca/, "NVIDIA DOCA", "NVIDIA's DOCA"],
];
const MISSING = /^(\S+): cannot open shared object file/;
const VERSION = /version [`'"]?([A-Z]+_[0-9.]+)'? not found/;

export function pluginNames(files: readonly string[]): string[] {
  return files.flatMap((file) => PLUGIN_FILE.exec(file)?.[1] ?? []);
}

/**
 * A plugin, and what its loading in another process came to. One that was chosen must load; one that lacks a library of hardware that is not
 * here is worth a note; a damaged file is worth a warning in any case.
 */
export function pluginCheck(
  name: string,
  outcome: ChildOutcome,
  { chosen, wanted }: { chosen: boolean; wanted: boolean },
): Check {
  const check = { id: `plugins.${name}`, area: "plugins", title: name } as const;
  const problem = problemOf(outcome);
  if (problem === undefined) return { ...check, status: "ok", found: chosen ? "loads; chosen" : "loads" };
  const missing = MISSING.exec(problem)?.[1];
  const details = { problem, missing: missing ?? null };
  const serious = chosen ? "fail" : "warn";
  if (missing !== undefined) {
    const [, belongsTo, fix] = LIBRARIES.find(([pattern]) => pattern.test(missing)) ?? [];
    const found = `does not load: ${missing} is missing${belongsTo === undefined ? "" : ` (${belongsTo})`}`;
    const status = chosen || wanted ? serious : "note";
    return { ...check, status, found, ...(status === "note" || fix === undefined ? {} : { fix }), details };
  }
  const version = VERSION.exec(problem)?.[1];
  if (version !== undefined) {
    return {
      ...check,
      status: chosen || wanted ? serious : "note",
      found: `does not load: ${problem}`,
      fix: `a newer library that has ${version}, or an older NIXL`,
      details,
    };
  }
  return {
    ...check,
    status: serious,
    found: `is damaged: ${problem}`,
    fix: "remove that installation of NIXL and install it again: npx --no-install kv-nixl install",
    details,
  };
}

function problemOf(outcome: ChildOutcome): string | undefined {
  switch (outcome.kind) {
    case "answered":
      return (outcome.value as PluginAnswer).problem;
    case "failed":
      return outcome.error.message;
    case "died":
      return `loading it ends the process with ${outcome.how}`;
    case "late":
      return `loading it does not end within ${outcome.timeoutMs / 1000} s`;
  }
}
