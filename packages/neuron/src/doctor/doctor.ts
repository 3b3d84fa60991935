import { libraryChecks, runtimeCheck } from "./library-checks.js";
import { type DoctorSurroundings, machineChecks, networkChecks } from "./machine-checks.js";
import { type Check, type DoctorReport, reportOf } from "./report.js";
import { runProbe } from "./run-probe.js";

export interface DoctorOptions extends Partial<DoctorSurroundings> {
  /** Initialise the runtime, in a process of its own, which takes the cores for that long. True by default. */
  readonly tryRuntime?: boolean;
  /** Longest that a stage of a probe may take, such as `nrt_init`; 60 s by default. */
  readonly timeoutMs?: number;
}

const UNTRIED: Check = {
  id: "runtime.tried",
  area: "runtime",
  title: "tried on hardware",
  status: "warn",
  found: "never by us: this package has been run against a stand-in for libnrt only",
  fix: "compare tokens with those of one engine before you trust it",
};

/** What of a Neuron instance is here. Whatever may crash or hang is tried in a process of its own. It does not throw for what it finds. */
export async function doctor(options: DoctorOptions = {}): Promise<DoctorReport> {
  const { env = process.env, root = "", tryRuntime = true, timeoutMs = 60_000 } = options;
  const library = libraryChecks(await runProbe("library", { env, timeoutMs }));
  const usable = library.every(({ status }) => status !== "fail");
  const tried = usable && tryRuntime ? await runProbe("runtime", { env, timeoutMs }) : undefined;
  const runtime: Check =
    usable && !tryRuntime
      ? { ...runtimeCheck(undefined), found: "not tried, as asked" }
      : runtimeCheck(tried);
  return reportOf([
    ...machineChecks({ env, root }),
    ...library,
    runtime,
    UNTRIED,
    ...networkChecks({ env, root }),
  ]);
}
