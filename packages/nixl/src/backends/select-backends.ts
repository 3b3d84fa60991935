import { type BackendSpec, KvError, type Log } from "@kv/interface";
import { requireObject, shown } from "../validate.js";
import { backendFacts, DEFAULT_BACKEND } from "./backend-traits.js";

/** Read in this order when no backend is asked for explicitly. */
const CHOOSING = ["NIXL_BACKEND", "VLLM_NIXL_BACKEND"] as const;
/** Variables of other systems that nothing reads here, nor in vLLM. */
const WITHOUT_EFFECT: Readonly<Record<string, string>> = {
  VLLM_NIXL_KVCACHE_BACKEND: "nothing reads it; NIXL_BACKEND chooses the backend",
  NCCL_IB_HCA: "it is NCCL's, which moves no KV here; for UCX see UCX_NET_DEVICES",
  NCCL_SOCKET_IFNAME: "it is NCCL's, which moves no KV here; for UCX see UCX_NET_DEVICES",
};

/** The source of a choice that nobody made. */
export const DEFAULT_SOURCE = "the default";

export interface BackendChoice {
  /** What was asked for, by the transport's options or by an agent's. */
  explicit: readonly (BackendSpec | string)[] | undefined;
  /** Who asked: "the option backends" when absent. */
  asker?: string;
  environment: Readonly<Record<string, string | undefined>>;
  log: Log;
}

/**
 * Backends in order of preference: what was asked for, else `NIXL_BACKEND` or `VLLM_NIXL_BACKEND` (names separated by
 * commas), else UCX. Each variable that is set and has no effect is warned of, with its value and what won.
 */
export function chooseBackends(choice: BackendChoice): BackendSpec[] {
  return resolveBackends(choice).backends;
}

/** The same, with the source of the choice: the asker, the name of a variable, or "the default". */
export function resolveBackends(choice: BackendChoice): { backends: BackendSpec[]; source: string } {
  const { explicit, asker = "the option backends", environment, log } = choice;
  const given = (name: string) => environment[name]?.trim() || undefined;
  const asked = explicit === undefined ? [] : specsOf(explicit, asker);
  const wanted = asked.length === 0 ? undefined : asked;
  const variable = CHOOSING.find((name) => given(name) !== undefined);
  const source = wanted !== undefined ? asker : (variable ?? DEFAULT_SOURCE);
  const chosen =
    wanted ??
    (variable === undefined
      ? [{ name: DEFAULT_BACKEND }]
      : (given(variable) ?? "")
          .split(",")
          .map((name) => name.trim())
          .filter((name) => name !== "")
          .map(specOf));
  if (chosen.length === 0) {
    throw new KvError(
      "KV_BACKEND_UNAVAILABLE",
      `${source} names no backend: ${JSON.stringify(given(variable ?? ""))}`,
    );
  }
  const won = `${chosen.map((spec) => spec.name).join(",")} from ${source}`;
  const warn = (name: string, why: string) => {
    const value = given(name);
    if (value !== undefined) log.warn("nixl-variable-unused", { name, value, won, why });
  };
  for (const name of CHOOSING) if (name !== source) warn(name, `${source} comes first`);
  for (const [name, why] of Object.entries(WITHOUT_EFFECT)) warn(name, why);
  const unused = new Set(chosen.flatMap((spec) => backendFacts(spec.name).ignores));
  for (const name of unused) {
    if (chosen.every((spec) => backendFacts(spec.name).ignores.includes(name)))
      warn(name, "the chosen backend does not read it");
  }
  return { backends: chosen, source };
}

/**
 * Backends that an agent asks for itself. Errors: `KV_BACKEND_UNAVAILABLE` for none, and for what is no name; `KV_AGENT_INVALID` for parameters that
 * are not strings.
 */
export function checkBackends(backends: readonly BackendSpec[]): BackendSpec[] {
  const specs = specsOf(backends, "the agent's backends");
  if (specs.length === 0) {
    throw new KvError(
      "KV_BACKEND_UNAVAILABLE",
      "an agent needs a backend, and the list of backends is empty",
      {
        hint: "leave it out for the transport's own choice",
      },
    );
  }
  return specs;
}

function specsOf(entries: readonly (BackendSpec | string)[], asker: string): BackendSpec[] {
  if (Array.isArray(entries)) return entries.map(specOf);
  throw new KvError("KV_BACKEND_UNAVAILABLE", `${asker}: ${shown(entries)} is not a list of backends`, {
    hint: 'such as ["UCX"]',
  });
}

function specOf(entry: BackendSpec | string): BackendSpec {
  const spec = typeof entry === "string" ? { name: entry } : entry;
  requireObject(spec, "KV_BACKEND_UNAVAILABLE", "a backend");
  if (typeof spec.name !== "string" || !/^[A-Za-z0-9_]{1,64}$/.test(spec.name)) {
    throw new KvError("KV_BACKEND_UNAVAILABLE", `${shown(spec.name)} is not the name of a NIXL backend`, {
      hint: "such as UCX or LIBFABRIC",
    });
  }
  checkParameters(spec);
  return spec;
}

/** NIXL 0.10.1 and 1.0.1 take their default for one that they cannot read, without a word. */
const UCX_COUNTS: ReadonlySet<string> = new Set(["num_workers", "num_threads"]);

/** The value of a parameter may be a secret: what it is says enough. */
function checkParameters({ name, parameters }: BackendSpec): void {
  if (parameters === undefined) return;
  const refused = (what: string) =>
    new KvError("KV_AGENT_INVALID", `${what} of backend ${name}`, {
      hint: 'parameters are names and strings, such as { num_workers: "2" }',
    });
  if (typeof parameters !== "object" || parameters === null || Array.isArray(parameters)) {
    throw refused(`${shown(parameters)} instead of the parameters`);
  }
  for (const [key, value] of Object.entries(parameters)) {
    if (key === "") throw refused("a parameter without a name");
    if (typeof value !== "string") {
      throw refused(`${value === null ? "null" : typeof value} instead of a string for the parameter ${key}`);
    }
    if (`${key}${value}`.includes("\0")) throw refused(`a NUL in the parameter ${shown(key)}`);
    if (name === "UCX" && UCX_COUNTS.has(key) && !/^\d{1,9}$/.test(value)) {
      throw refused(`${shown(value)} instead of a whole number for the parameter ${key}`);
    }
  }
}
