import type { DescribedLibrary, TriedRuntime } from "./probe-answers.js";
import type { Check } from "./report.js";
import type { ProbeOutcome } from "./run-probe.js";

const BATCH = ["nrt_tensor_read_batch", "nrt_tensor_write_batch"];
const RUNTIME = "install aws-neuronx-runtime-lib, or set KV_NRT_LIBRARY to the path of libnrt.so.1";

/** Which file the loader takes, and which of the calls that are made it has. */
export function libraryChecks(outcome: ProbeOutcome): Check[] {
  const title = { id: "library.path", area: "library", title: "libnrt.so" } as const;
  if (outcome.kind !== "answered") {
    const { found, fix } = trouble(outcome);
    return [{ ...title, status: "fail", found, fix: fix ?? RUNTIME }];
  }
  const { path, symbols } = outcome.answer as DescribedLibrary;
  const names = Object.keys(symbols);
  const missing = names.filter((name) => symbols[name] !== true && !BATCH.includes(name));
  const batch = BATCH.filter((name) => symbols[name] === true);
  const there = names.length - missing.length - (BATCH.length - batch.length);
  return [
    { ...title, status: "ok", found: path, details: { path } },
    {
      ...{ id: "library.symbols", area: "library", title: "calls", details: { symbols } },
      ...(missing.length === 0
        ? { status: "ok", found: `${there} of ${names.length} that are made` }
        : { status: "fail", found: `${path} has no ${missing.join(", ")}: it is no libnrt 2`, fix: RUNTIME }),
    },
    {
      ...{ id: "library.batch", area: "library", title: "batch copies" },
      ...(batch.length === BATCH.length
        ? { status: "ok", found: batch.join(", ") }
        : {
            status: "warn",
            found: "not in this library: each run of blocks is a call of its own",
            fix: "a newer aws-neuronx-runtime-lib has them",
          }),
    },
  ];
}

/** What became of initialising the runtime and of a copy there and back, in a process of its own; undefined where it was not tried. */
export function runtimeCheck(outcome: ProbeOutcome | undefined): Check {
  const check = { id: "runtime.init", area: "runtime", title: "nrt_init and a copy" } as const;
  if (outcome === undefined)
    return { ...check, status: "note", found: "not tried: there is no library for it" };
  if (outcome.kind !== "answered") {
    const { found, fix } = trouble(outcome);
    const usual =
      "another process may hold the cores (neuron-ls), or driver and runtime may not fit: look at dmesg";
    return { ...check, status: "fail", found, fix: fix ?? usual };
  }
  const { initMs, copied } = outcome.answer as TriedRuntime;
  if (!copied) {
    return {
      ...check,
      status: "fail",
      found: "bytes that were written to a tensor did not come back",
      fix: "do not use nrtDevice() here, and tell us which runtime it is",
    };
  }
  return { ...check, status: "ok", found: `nrt_init in ${Math.round(initMs)} ms, 4096 bytes there and back` };
}

function trouble(outcome: Exclude<ProbeOutcome, { kind: "answered" }>): { found: string; fix?: string } {
  if (outcome.kind === "failed") {
    return { found: outcome.error, ...(outcome.hint === undefined ? {} : { fix: outcome.hint }) };
  }
  if (outcome.kind === "late")
    return { found: `no answer within ${outcome.timeoutMs} ms, in ${outcome.stage}` };
  const [said = ""] = outcome.output.split("\n").slice(-1);
  return {
    found: `the process that tried it ended in ${outcome.stage} by ${outcome.how}${said === "" ? "" : `: ${said}`}`,
  };
}
