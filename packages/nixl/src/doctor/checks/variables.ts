import { KvError, type Log, silentLog } from "@kv/interface";
import { DEFAULT_SOURCE, selectBackends } from "../../backends/select-backends.js";
import { type Environment, warnOfUnusedLibraryVariables } from "../../environment.js";
import type { Check } from "../../reports.js";
import { finding } from "./finding.js";
import VARIABLES from "./variables.json" with { type: "json" };

/** What the doctor's caller requests comes before the environment. */
export interface DoctorRequest {
  /** Path of `libnixl_capi.so`. */
  readonly library?: string | undefined;
  readonly backends?: readonly string[] | undefined;
}

export interface RequestedBackends {
  /** Empty when the selection itself fails. */
  readonly names: readonly string[];
  readonly check: Check;
  /**
   * With these arguments and variables a probe selects a backend from the same source, so that its
   * errors name that source.
   */
  selectInProbe(name: string): { args: readonly string[]; env: Environment };
}

const BACKEND_OPTION = "the option --backend";

export function requestedBackends(
  environment: Environment,
  request: DoctorRequest,
): RequestedBackends {
  const check = { id: "variables.backend", area: "variables", title: "selected backend" } as const;
  try {
    const { backends, source } = selectBackends({
      explicit: request.backends,
      option: BACKEND_OPTION,
      environment,
    });
    const names = backends.map(({ name }) => name);
    const byDefault = source === DEFAULT_SOURCE;
    const found = `${names.join(", ")}, ${byDefault ? "by default" : `from ${source}`}`;
    return {
      names,
      check: { ...check, status: "note", found, details: { backends: names, source } },
      selectInProbe: (name) =>
        source === BACKEND_OPTION
          ? { args: [name], env: {} }
          : { args: [], env: byDefault ? {} : { [source]: name } },
    };
  } catch (error) {
    const {
      message,
      code,
      hint = "such as UCX or LIBFABRIC",
    } = KvError.from(error, "KV_INTERNAL", "no backend is selected");
    return {
      names: [],
      check: { ...check, status: "fail", found: `${message} [${code}]`, fix: hint },
      selectInProbe: (name) => ({ args: [name], env: {} }),
    };
  }
}

const EFFECTS: Readonly<Record<string, string>> = VARIABLES.effects;
/** Effects of other variables, by the beginnings of their names. */
const FAMILIES = Object.entries(VARIABLES.families);
/** What is said of some values of a variable; `values` is a pattern. */
const REMARKS: Readonly<Record<string, Record<"values" | "status" | "found" | "fix", string>>> =
  VARIABLES.remarks;

/** A variable that looks relevant but has no effect gets a warning. */
export function variableChecks(environment: Environment, request: DoctorRequest): Check[] {
  const unused = new Map<string, string>();
  const log: Log = {
    ...silentLog,
    warn: (_event, fields = {}) =>
      void unused.set(String(fields["name"]), `${fields["why"]}; used: ${fields["won"]}`),
  };
  selectBackends({ explicit: request.backends, option: BACKEND_OPTION, environment, log });
  warnOfUnusedLibraryVariables({ library: request.library, environment, log });
  const checks = Object.entries(environment)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .flatMap(([name, value = ""]) => variableCheck(name, value, unused.get(name)));
  return [...(checks.length > 0 ? checks : [NONE]), ...sideChannelDefault(environment)];
}

function variableCheck(name: string, value: string, unused: string | undefined): Check[] {
  if (value === "" && EFFECTS[name] === undefined) return [];
  const check = (status: Check["status"], found: string, fix?: string) => [
    finding("variables", name, name, { value })(status, found, fix),
  ];
  if (unused !== undefined)
    return check("warn", `${value}: has no effect: ${unused}`, `unset ${name}`);
  if (value === "") return check("note", "set but empty, which counts as not set");
  const remark = REMARKS[name];
  if (remark !== undefined && new RegExp(remark.values, "i").test(value))
    return check(remark.status as Check["status"], `${value}: ${remark.found}`, remark.fix);
  const effect = EFFECTS[name] ?? FAMILIES.find(([prefix]) => name.startsWith(prefix))?.[1];
  return effect === undefined ? [] : check("note", `${value}: ${effect}`);
}

const NONE: Check = {
  id: "variables",
  area: "variables",
  title: "variables",
  status: "ok",
  found: "none of the variables that matter is set",
};

/** Without the variable vLLM and `@kv/connector` use localhost, which works on one host only. */
function sideChannelDefault({ VLLM_NIXL_SIDE_CHANNEL_HOST: host }: Environment): Check[] {
  if (host) return [];
  const check = finding("variables", "side-channel", "VLLM_NIXL_SIDE_CHANNEL_HOST");
  const { found, fix } = VARIABLES.remarks.VLLM_NIXL_SIDE_CHANNEL_HOST;
  return [check("note", `not set: localhost, by default; ${found}`, fix)];
}
