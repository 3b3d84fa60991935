import type { Log } from "@kv/interface";
import { resolveBackends } from "../../backends/select-backends.js";
import { type Environment, warnOfUnusedVariables } from "../../library/find-library.js";
import type { Check } from "../report.js";
import { ASKER, type Asked } from "./requested-backends.js";

/** What a variable does, or, where it says so, that it does nothing. */
const EFFECTS: Readonly<Record<string, string>> = {
  KV_NIXL_LIBRARY: "the library that is loaded; no other place is tried",
  NIXL_PREFIX: "the installation of NIXL that is used; no other place is tried",
  NIXL_PLUGIN_DIR: "where NIXL looks for its plugins, instead of beside the library",
  NIXL_BACKEND: "chooses the backend, unless the program asks for one",
  VLLM_NIXL_BACKEND: "chooses the backend, unless NIXL_BACKEND or the program does",
  NIXL_LOG_LEVEL: "how much NIXL logs",
  NIXL_TELEMETRY_ENABLE: "NIXL writes its own telemetry",
  NIXL_TELEMETRY_DIR: "where NIXL's own telemetry goes",
  NIXL_LIBFABRIC_MAX_BW_PER_DRAM_SEG: "Gbit/s that LIBFABRIC gives to a registration of DRAM",
  UCX_TLS: "transports that UCX may use; must leave one that reaches the peer",
  UCX_NET_DEVICES: "network devices that UCX may use",
  UCX_MODULES: "modules that UCX loads; ^ib leaves InfiniBand out",
  UCX_MEM_EVENTS: "UCX's hooks on memory; y can crash a process with other threads (README, Variables)",
  UCX_MEMTYPE_CACHE: "UCX remembers which memory is the GPU's",
  UCX_MEMTYPE_REG_WHOLE: "UCX registers whole GPU allocations",
  UCX_RCACHE_MAX_UNRELEASED: "bound of UCX's cache of registrations",
  UCX_LOG_LEVEL: "how much UCX logs",
  UCX_LOG_FILE: "where UCX logs to; stdout mixes with a program's output",
  UCX_PROTO_INFO: "UCX prints the protocols that it picks",
  FI_PROVIDER: "the provider that libfabric may use",
  FI_PROVIDER_PATH: "where libfabric looks for providers",
  FI_LOG_LEVEL: "how much libfabric logs",
  FI_EFA_USE_DEVICE_RDMA: "EFA reads and writes the peer's memory itself",
  LD_LIBRARY_PATH: "where the loader looks for the libraries that plugins need",
  VLLM_NIXL_SIDE_CHANNEL_HOST: "the host that peers are told for handshakes",
  VLLM_NIXL_SIDE_CHANNEL_PORT: "the port of handshakes",
  VLLM_NIXL_ABORT_REQUEST_TIMEOUT: "the lease of a request whose reader sends no heartbeats",
};
const FAMILIES: readonly [prefix: string, effect: string][] = [
  ["UCX_", "handed to UCX, which warns of names that it does not know"],
  ["NIXL_", "handed to NIXL"],
  ["FI_", "handed to libfabric"],
];
const NOT_NIXL = /^NCCL_/;
const LOCAL_HOSTS = ["localhost", "127.0.0.1", "::1"];
const NOT_REACHED = "peers on other hosts look for this engine on their own";
const ADDRESS = "an address of this host, as soon as a peer runs elsewhere";

/** Every variable that is set and matters, with what it does; those that look as if they did, and do not, warn. */
export function variableChecks(environment: Environment, asked: Asked): Check[] {
  const unused = new Map<string, string>();
  const log: Log = silent((fields) => unused.set(String(fields.name), `${fields.why}; used: ${fields.won}`));
  resolveBackends({ explicit: asked.backends, asker: ASKER, environment, log });
  warnOfUnusedVariables({ library: asked.library, environment, log });
  const checks: Check[] = [];
  for (const [name, value = ""] of Object.entries(environment).sort(([a], [b]) => (a < b ? -1 : 1))) {
    if (value === "" && EFFECTS[name] === undefined) continue;
    const check = { id: `variables.${name}`, area: "variables", title: name, details: { value } } as const;
    const why = unused.get(name);
    if (why !== undefined) {
      checks.push({
        ...check,
        status: "warn",
        found: `${value}: has no effect: ${why}`,
        fix: `unset ${name}`,
      });
    } else if (NOT_NIXL.test(name)) {
      checks.push({
        ...check,
        status: "note",
        found: `${value}: for NCCL; has no effect on NIXL (UCX_NET_DEVICES has)`,
      });
    } else if (value === "") {
      checks.push({ ...check, status: "note", found: "set and empty: taken as not set" });
    } else if (name === "VLLM_NIXL_SIDE_CHANNEL_HOST" && LOCAL_HOSTS.includes(value)) {
      checks.push({
        ...check,
        status: "note",
        found: `${value}: ${NOT_REACHED}`,
        fix: ADDRESS,
      });
    } else if (name === "UCX_MEM_EVENTS" && /^(y|yes|1|on|true|try)$/i.test(value)) {
      checks.push({
        ...check,
        status: "warn",
        found: `${value}: ${EFFECTS[name]}`,
        fix: "UCX_MEM_EVENTS=n, or unset it",
      });
    } else {
      const effect = EFFECTS[name] ?? FAMILIES.find(([prefix]) => name.startsWith(prefix))?.[1];
      if (effect !== undefined) checks.push({ ...check, status: "note", found: `${value}: ${effect}` });
    }
  }
  return [...(checks.length > 0 ? checks : [NONE]), ...sideChannelDefault(environment)];
}

const NONE: Check = {
  id: "variables",
  area: "variables",
  title: "variables",
  status: "ok",
  found: "none of those that matter is set",
};

/** What vLLM and `@kv/connector` use where nothing is said: good on one host, and no more. */
function sideChannelDefault({ VLLM_NIXL_SIDE_CHANNEL_HOST: host }: Environment): Check[] {
  if (host) return [];
  return [
    {
      id: "variables.side-channel",
      area: "variables",
      title: "VLLM_NIXL_SIDE_CHANNEL_HOST",
      status: "note",
      found: `not set: localhost, by default; ${NOT_REACHED}`,
      fix: ADDRESS,
    },
  ];
}

function silent(onWarning: (fields: Record<string, unknown>) => void): Log {
  return {
    debug: () => {},
    info: () => {},
    warn: (_event, fields = {}) => onWarning({ ...fields }),
    error: () => {},
  };
}
