import { type ChildFailure, type ChildOutcome, failureText } from "@kv/program";
import type { DescribedLibrary } from "../libnrt.js";
import type { TriedRuntime } from "./probe.js";
import type { Check } from "./report.js";

const BATCH = ["nrt_tensor_read_batch", "nrt_tensor_write_batch"];
const RUNTIME = "install aws-neuronx-runtime-lib, or set KV_NRT_LIBRARY to the path of libnrt.so.1";

export function libraryChecks(outcome: ChildOutcome<DescribedLibrary>): Check[] {
  const title = { id: "library.path", area: "library", title: "libnrt.so" } as const;
  if (outcome.kind !== "answered") return [{ ...title, ...failed(outcome, RUNTIME) }];
  const { path, symbols } = outcome.value;
  const names = Object.keys(symbols);
  const missing = names.filter((name) => symbols[name] !== true && !BATCH.includes(name));
  const batch = BATCH.filter((name) => symbols[name] === true);
  const present = names.length - missing.length - (BATCH.length - batch.length);
  return [
    { ...title, status: "ok", found: path, details: { path } },
    {
      id: "library.symbols",
      area: "library",
      title: "functions",
      details: { symbols },
      ...(missing.length === 0
        ? { status: "ok", found: `${present} of ${names.length} required functions` }
        : {
            status: "fail",
            found: `${path} lacks ${missing.join(", ")}: it is not libnrt 2`,
            fix: RUNTIME,
          }),
    },
    {
      id: "library.batch",
      area: "library",
      title: "batch copies",
      ...(batch.length === BATCH.length
        ? { status: "ok", found: batch.join(", ") }
        : {
            status: "warn",
            found: "not in this library: each run of blocks takes one call",
            fix: "install a newer aws-neuronx-runtime-lib",
          }),
    },
  ];
}

/** `outcome` is undefined when the runtime was not tried. */
export function runtimeCheck(outcome: ChildOutcome<TriedRuntime> | undefined): Check {
  const check = { id: "runtime.init", area: "runtime", title: "nrt_init and a copy" } as const;
  if (outcome === undefined)
    return { ...check, status: "note", found: "not tried: there is no usable library" };
  if (outcome.kind !== "answered") {
    const fix =
      "another process may use the cores (neuron-ls), or driver and runtime may not match: see dmesg";
    return { ...check, ...failed(outcome, fix) };
  }
  const { initMs, copied } = outcome.value;
  if (!copied) {
    return {
      ...check,
      status: "fail",
      found: "bytes written to a tensor were not read back",
      fix: "do not use nrtDevice() here, and report the version of the runtime",
    };
  }
  return {
    ...check,
    status: "ok",
    found: `nrt_init in ${Math.round(initMs)} ms, 4096 bytes written and read back`,
  };
}

function failed(failure: ChildFailure, usualFix: string): Pick<Check, "status" | "found" | "fix"> {
  const hint = failure.kind === "failed" ? failure.error.hint : undefined;
  return { status: "fail", found: failureText(failure), fix: hint ?? usualFix };
}
