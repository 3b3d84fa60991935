import { type BackendSpec, KvError, type Log, silentLog } from "@kv/interface";
import type { Environment } from "../environment.js";
import { formatValue, requireOptions } from "../validate.js";
import { backendTraits, DEFAULT_BACKEND, variablesSet } from "./backend-traits.js";

/** In order of precedence. */
const SELECTING = ["NIXL_BACKEND", "VLLM_NIXL_BACKEND"] as const;
/** Variables that seem to select something, and why they do not. */
const WITHOUT_EFFECT: Readonly<Record<string, string>> = {
  VLLM_NIXL_KVCACHE_BACKEND: "nothing reads it; NIXL_BACKEND selects the backend",
  NCCL_IB_HCA: "it is for NCCL, which moves no KV here; for UCX see UCX_NET_DEVICES",
  NCCL_SOCKET_IFNAME: "it is for NCCL, which moves no KV here; for UCX see UCX_NET_DEVICES",
};

export const DEFAULT_SOURCE = "the default";

export interface BackendSettings {
  /** In order of preference; without any, the variables decide. */
  readonly explicit: readonly (BackendSpec | string)[] | undefined;
  /** The option's name for messages; "the option backends" by default. */
  readonly option?: string | undefined;
  readonly environment: Environment;
  /** Gets `nixl-variable-unused` for each variable without effect. */
  readonly log?: Log | undefined;
}

export interface SelectedBackends {
  /** In order of preference; never empty. */
  readonly backends: BackendSpec[];
  /** The option, the name of a variable, or `DEFAULT_SOURCE`. */
  readonly source: string;
}

/**
 * Selects the backends of the option, else of `NIXL_BACKEND` or `VLLM_NIXL_BACKEND` (separated by
 * commas), else UCX. Throws `KV_BACKEND_UNAVAILABLE` for impossible names, `KV_AGENT_INVALID` for
 * parameters that are not strings.
 */
export function selectBackends(settings: BackendSettings): SelectedBackends {
  const { explicit, option = "the option backends", environment, log = silentLog } = settings;
  const selected = select(explicit, option, environment);
  const { backends, source } = selected;
  const won = `${backends.map((spec) => spec.name).join(",")} from ${source}`;
  const warn = (name: string, why: string) => {
    const value = valueIn(environment, name);
    if (value !== undefined) log.warn("nixl-variable-unused", { name, value, won, why });
  };
  for (const name of SELECTING) if (name !== source) warn(name, `${source} comes first`);
  for (const [name, why] of Object.entries(WITHOUT_EFFECT)) warn(name, why);
  const ignored = backends.map((spec) =>
    variablesSet(environment, backendTraits(spec.name).ignores),
  );
  for (const name of new Set(ignored.flat())) {
    if (ignored.every((names) => names.includes(name)))
      warn(name, "the selected backend does not read it");
  }
  return selected;
}

function select(
  explicit: BackendSettings["explicit"],
  option: string,
  environment: Environment,
): SelectedBackends {
  const asked = explicit === undefined ? [] : specsOf(explicit, option);
  if (asked.length > 0) return { backends: asked, source: option };
  const variable = SELECTING.find((name) => valueIn(environment, name) !== undefined);
  if (variable === undefined)
    return { backends: [{ name: DEFAULT_BACKEND }], source: DEFAULT_SOURCE };
  const value = valueIn(environment, variable) ?? "";
  const names = value.split(",").map((name) => name.trim());
  const backends = names.filter((name) => name !== "").map(specOf);
  if (backends.length > 0) return { backends, source: variable };
  throw new KvError(
    "KV_BACKEND_UNAVAILABLE",
    `${variable} names no backend: ${JSON.stringify(value)}`,
    {
      hint: `such as ${variable}=LIBFABRIC, or unset it for ${DEFAULT_BACKEND}`,
    },
  );
}

/**
 * Throws `KV_BACKEND_UNAVAILABLE` for an empty list or impossible names, `KV_AGENT_INVALID` for
 * parameters that are not strings.
 */
export function validateAgentBackends(backends: readonly (BackendSpec | string)[]): BackendSpec[] {
  const specs = specsOf(backends, "the agent's backends");
  if (specs.length > 0) return specs;
  throw new KvError("KV_BACKEND_UNAVAILABLE", "the agent's list of backends is empty", {
    hint: "leave the option out to use the transport's backends",
  });
}

/** A blank variable counts as unset. */
const valueIn = (environment: Environment, name: string): string | undefined =>
  environment[name]?.trim() || undefined;

function specsOf(entries: readonly (BackendSpec | string)[], option: string): BackendSpec[] {
  if (Array.isArray(entries)) return entries.map(specOf);
  throw new KvError(
    "KV_BACKEND_UNAVAILABLE",
    `${option}: ${formatValue(entries)} is not a list of backends`,
    { hint: 'such as ["UCX"]' },
  );
}

function specOf(entry: BackendSpec | string): BackendSpec {
  const spec = typeof entry === "string" ? { name: entry } : entry;
  requireOptions(spec, "KV_BACKEND_UNAVAILABLE", "a backend", ["name", "parameters"]);
  if (typeof spec.name !== "string" || !/^[A-Za-z0-9_]{1,64}$/.test(spec.name)) {
    throw new KvError(
      "KV_BACKEND_UNAVAILABLE",
      `${formatValue(spec.name)} is not the name of a NIXL backend`,
      { hint: "such as UCX or LIBFABRIC" },
    );
  }
  requireParameters(spec);
  return spec;
}

/** NIXL 0.10.1 and 1.0.1 silently use their default when such a UCX parameter is no number. */
const UCX_COUNTS: ReadonlySet<string> = new Set(["num_workers", "num_threads"]);

/** A value may be a secret, so messages state its type only. */
function requireParameters({ name, parameters }: BackendSpec): void {
  if (parameters === undefined) return;
  const invalid = (what: string) =>
    new KvError("KV_AGENT_INVALID", `${what} of backend ${name}`, {
      hint: 'parameters are names and strings, such as { num_workers: "2" }',
    });
  if (typeof parameters !== "object" || parameters === null || Array.isArray(parameters)) {
    throw invalid(`${formatValue(parameters)} instead of the parameters`);
  }
  for (const [key, value] of Object.entries(parameters)) {
    if (key === "") throw invalid("a parameter without a name");
    if (typeof value !== "string") {
      throw invalid(
        `${value === null ? "null" : typeof value} instead of a string for the parameter ${key}`,
      );
    }
    if (`${key}${value}`.includes("\0"))
      throw invalid(`a NUL in the parameter ${formatValue(key)}`);
    if (name === "UCX" && UCX_COUNTS.has(key) && !/^\d{1,9}$/.test(value)) {
      throw invalid(`${formatValue(value)} instead of a whole number for the parameter ${key}`);
    }
  }
}
