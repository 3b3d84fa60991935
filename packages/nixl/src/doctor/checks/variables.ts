import { KvError, type Log, silentLog } from "@kv/interface";
import { DEFAULT_SOURCE, selectBackends } from "../../backends/select-backends.js";
import { type Environment, warnOfUnusedLibraryVariables } from "../../environment.js";
import type { Check } from "../../reports.js";
import { finding } from "./finding.js";

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

const EFFECTS: Readonly<Record<string, string>> = {
  KV_NIXL_LIBRARY: "the library that is loaded; no other place is tried",
  NIXL_PREFIX: "the installation of NIXL that is used; no other place is tried",
  NIXL_PLUGIN_DIR: "where NIXL looks for its plugins, instead of beside the library",
  NIXL_BACKEND: "selects the backend, unless the program names one",
  VLLM_NIXL_BACKEND: "selects the backend, unless NIXL_BACKEND or the program does",
  NIXL_LOG_LEVEL: "how much NIXL logs",
  NIXL_TELEMETRY_ENABLE: "NIXL writes its own telemetry",
  NIXL_TELEMETRY_DIR: "where NIXL's own telemetry goes",
  NIXL_LIBFABRIC_MAX_BW_PER_DRAM_SEG:
    "bandwidth in Gbit/s that LIBFABRIC assigns to a registration of DRAM",
  UCX_TLS: "transports that UCX may use; one of them must reach the peer",
  UCX_NET_DEVICES: "network devices that UCX may use",
  UCX_MODULES: "modules that UCX loads; ^ib excludes InfiniBand",
  UCX_MEM_EVENTS:
    "UCX's hooks on memory; y can crash a process with other threads (README, Variables)",
  UCX_MEMTYPE_CACHE: "UCX caches which memory belongs to a GPU",
  UCX_MEMTYPE_REG_WHOLE: "UCX registers whole GPU allocations",
  UCX_CMA_TX_QUOTA: "pieces that UCX copies per turn of its progress on one host",
  UCX_CUDA_IPC_ENABLE_GET_ZCOPY:
    "UCX reads GPU memory of other processes by CUDA IPC, also without NVLinks",
  UCX_RCACHE_MAX_UNRELEASED: "limit of UCX's registration cache",
  UCX_LOG_LEVEL: "how much UCX logs",
  UCX_LOG_FILE: "where UCX logs; stdout mixes with the program's output",
  UCX_PROTO_INFO: "UCX prints the protocols that it selects",
  FI_PROVIDER: "the provider that libfabric may use",
  FI_PROVIDER_PATH: "where libfabric looks for providers",
  FI_LOG_LEVEL: "how much libfabric logs",
  FI_EFA_USE_DEVICE_RDMA: "EFA reads and writes the peer's memory by RDMA",
  LD_LIBRARY_PATH: "where the loader looks for the libraries that plugins need",
  VLLM_NIXL_SIDE_CHANNEL_HOST: "the host that peers use for handshakes",
  VLLM_NIXL_SIDE_CHANNEL_PORT: "the port for handshakes",
  VLLM_NIXL_ABORT_REQUEST_TIMEOUT: "the lease of a request whose reader sends no heartbeats",
};
const FAMILIES: readonly [prefix: string, effect: string][] = [
  ["UCX_", "read by UCX, which warns about names that it does not know"],
  ["NIXL_", "read by NIXL"],
  ["FI_", "read by libfabric"],
];
const NOT_NIXL = /^NCCL_/;
const LOCAL_HOSTS = ["localhost", "127.0.0.1", "::1"];
const NOT_REACHED = "peers on other hosts would look for this engine on their own host";
const ADDRESS = "an address of this host, once a peer runs on another one";

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
  const details = { value };
  const check = (status: Check["status"], found: string, fix?: string) => [
    finding("variables", name, name)(
      status,
      found,
      fix === undefined ? { details } : { fix, details },
    ),
  ];
  if (unused !== undefined)
    return check("warn", `${value}: has no effect: ${unused}`, `unset ${name}`);
  if (NOT_NIXL.test(name))
    return check("note", `${value}: for NCCL; has no effect on NIXL (UCX_NET_DEVICES has)`);
  if (value === "") return check("note", "set but empty, which counts as not set");
  if (name === "VLLM_NIXL_SIDE_CHANNEL_HOST" && LOCAL_HOSTS.includes(value))
    return check("note", `${value}: ${NOT_REACHED}`, ADDRESS);
  if (name === "UCX_MEM_EVENTS" && /^(y|yes|1|on|true|try)$/i.test(value))
    return check("warn", `${value}: ${EFFECTS[name]}`, "UCX_MEM_EVENTS=n, or unset it");
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
  const found = `not set: localhost, by default; ${NOT_REACHED}`;
  return [check("note", found, { fix: ADDRESS })];
}
