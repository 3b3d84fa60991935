import { createRequire } from "node:module";
import { type ChildOutcome, reportOfChecks, runInChild } from "@kv/program";
import type { DescribedLibrary } from "../libnrt.js";
import { libraryChecks, runtimeCheck } from "./library-checks.js";
import { type DoctorSurroundings, machineChecks, networkChecks } from "./machine-checks.js";
import type { TriedRuntime } from "./probe.js";
import type { Check, DoctorReport } from "./report.js";

/** Options of `doctor`. */
export interface DoctorOptions extends Partial<DoctorSurroundings> {
  /**
   * Initialises the runtime in a child process, which takes the cores meanwhile.
   * @default true
   */
  readonly tryRuntime?: boolean | undefined;
  /** Limit for one step of a probe, such as `nrt_init`. @default 60_000 */
  readonly timeoutMs?: number | undefined;
}

/** Limit until the probe loads the library. A busy machine is slow to start it. */
const START_TIMEOUT_MS = 300_000;

const UNTESTED: Check = {
  id: "runtime.tried",
  area: "runtime",
  title: "tested on hardware",
  status: "warn",
  found: "no: this package has only run against a stand-in for libnrt",
  fix: "compare its tokens with those of a single engine before production",
};

/**
 * Diagnoses a Neuron instance: devices, driver, libnrt, runtime and EFA. Steps that may crash or
 * hang run in a child process. Problems are lines of the report.
 */
export async function doctor(options: DoctorOptions = {}): Promise<DoctorReport> {
  const { env = process.env, root = "", tryRuntime = true, timeoutMs = 60_000 } = options;
  const probe = <T>(name: "library" | "runtime"): Promise<ChildOutcome<T>> =>
    runInChild({
      module: createRequire(import.meta.url).resolve("@kv/neuron/probe"),
      args: [name],
      env,
      timeoutMs,
      startTimeoutMs: Math.max(timeoutMs, START_TIMEOUT_MS),
    });
  const library = libraryChecks(await probe<DescribedLibrary>("library"));
  const usable = library.every(({ status }) => status !== "fail");
  const tried = usable && tryRuntime ? await probe<TriedRuntime>("runtime") : undefined;
  const runtime: Check =
    usable && !tryRuntime
      ? { ...runtimeCheck(undefined), found: "not tried (--no-init, or tryRuntime: false)" }
      : runtimeCheck(tried);
  return reportOfChecks([
    ...machineChecks({ env, root }),
    ...library,
    runtime,
    UNTESTED,
    ...networkChecks({ env, root }),
  ]);
}
