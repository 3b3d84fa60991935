import {
  type Agent,
  type Ambient,
  ambient,
  type BackendSpec,
  KvError,
  silentLog,
  type Transport,
  type TransportCapabilities,
} from "@kv/interface";
import { loadAddon } from "./addon/load-addon.js";
import type { NativeAddon } from "./addon/native.js";
import { createNixlAgent } from "./agent/agent.js";
import { explainUnavailable } from "./backends/backend-errors.js";
import { notifies, reportsPeerDeath } from "./backends/backend-traits.js";
import { type Preload, preloadFor } from "./backends/preload.js";
import { checkBackends, chooseBackends, resolveBackends } from "./backends/select-backends.js";
import { warnOfUcxOnEfa } from "./backends/ucx-on-efa.js";
import { findLibrary, warnOfUnusedVariables } from "./library/find-library.js";
import { requireWhole } from "./library/truncation-check.js";
import { allocateMemory } from "./memory/host-memory.js";
import { memoryTypesOf } from "./memory/memory-types.js";
import { type MetadataChecker, metadataChecker } from "./metadata/checker.js";
import { checkerProcess } from "./metadata/checker-process.js";
import { requireObject, shown } from "./validate.js";

export interface NixlTransportOptions extends Partial<Ambient> {
  /** Path of `libnixl_capi.so`, before every other place where it is looked for. */
  library?: string;
  /** Backends of agents that ask for none, in order of preference; before `NIXL_BACKEND` and the default, UCX. */
  backends?: readonly (BackendSpec | string)[];
  /**
   * Has another process load a peer's metadata before this one does, once for the same bytes: NIXL dies of some that are damaged, and only
   * metadata that came sealed or signed can be trusted not to be. Costs a process for each choice of backends, started with its first agent.
   * False by default.
   */
  checkMetadata?: boolean;
  /** Variables for NIXL, UCX and libfabric, set in the process's environment before NIXL loads, such as `UCX_TLS`. */
  env?: Readonly<Record<string, string>>;
}

/**
 * NIXL as a `Transport`. Nothing is loaded until the first agent or allocation. Errors then: `KV_ADDON_NOT_FOUND`,
 * `KV_LIBRARY_NOT_FOUND`, `KV_LIBRARY_INCOMPATIBLE`, `KV_BACKEND_UNAVAILABLE`. At once: `KV_CONFIG_INVALID`, and what `backends` may be refused with.
 */
export function nixlTransport(options: NixlTransportOptions = {}): Transport {
  checkOptions(options);
  const around = ambient(options);
  const { clock, random, log, metrics } = around;
  // Warnings wait for an agent, which may ask for backends of its own.
  const chosen = chooseBackends({ explicit: options.backends, environment: process.env, log: silentLog });
  const told = new Set<string>();
  const agents = new Set<Agent>();
  let addon: NativeAddon | undefined;
  let library: Promise<string> | undefined;
  let closed: Promise<void> | undefined;
  /** By the backends of the agents that they serve: one without the peer's backend would refuse it. */
  const checkers = new Map<string, MetadataChecker>();
  const preloads = new Map<string, Promise<Preload>>();

  const capabilities: TransportCapabilities = Object.freeze({
    read: true,
    write: true,
    notifications: notifies(chosen),
    crossProcess: true,
    memoryTypes: memoryTypesOf(chosen),
    reportsPeerDeath: reportsPeerDeath(chosen),
  });

  function open(): NativeAddon {
    if (closed !== undefined) throw new KvError("KV_TRANSPORT_CLOSED", "the NIXL transport is closed");
    if (addon === undefined) {
      addon = loadAddon();
      const wanted = Object.entries(options.env ?? {});
      if (wanted.length > 0 && addon.isLoaded()) {
        log.warn("nixl-environment-late", {
          variables: wanted,
          why: "NIXL is loaded in this process already",
        });
      }
      const set = addon.prepareEnvironment(wanted);
      for (const [name, value] of set) log.info("nixl-environment-default", { name, value });
      warnOfUnusedVariables({ library: options.library, environment: process.env, log });
    }
    return addon;
  }

  /** The backends of an agent and where they come from, told once for each choice. */
  function choose(asked: readonly BackendSpec[] | undefined) {
    const explicit = asked === undefined ? options.backends : checkBackends(asked);
    const asker = asked === undefined ? "the option backends" : "the agent's backends";
    const question = { explicit, asker, environment: process.env };
    const { backends, source } = resolveBackends({ ...question, log: silentLog });
    const names = backends.map((spec) => spec.name).join(",");
    if (!told.has(`${names} ${source}`)) {
      told.add(`${names} ${source}`);
      resolveBackends({ ...question, log });
      log.info("nixl-backends", { backends: names, source, variables: variablesOfNixl() });
      void warnOfUcxOnEfa(backends, log);
    }
    metrics.count("kv_nixl_agents_created", 1, { backends: names, source });
    return { backends, source };
  }

  /** What the backends need beside NIXL, and the variables for it, which are set. */
  async function prepareBackends(native: NativeAddon, specs: readonly BackendSpec[], libraryPath: string) {
    const paths: string[] = [];
    for (const { name } of specs) {
      const found = preloads.get(name) ?? preloadFor(name, libraryPath, process.env);
      preloads.set(name, found);
      const { libraries, variables } = await found;
      paths.push(...libraries);
      const missing = variables.filter(([variable]) => process.env[variable] === undefined);
      if (missing.length > 0)
        native.prepareEnvironment(missing.map(([variable, value]) => [variable, value]));
      if (libraries.length > 0) log.debug("nixl-libraries-supplied", { backend: name, libraries });
    }
    return paths;
  }

  function checkerFor(specs: readonly BackendSpec[], libraryPath: string): MetadataChecker {
    const names = specs.map((spec) => spec.name);
    const found = checkers.get(names.join(","));
    if (found !== undefined) return found;
    const environment = { ...process.env, ...options.env, KV_NIXL_LIBRARY: libraryPath };
    const checker = metadataChecker({ clock, start: (onEnd) => checkerProcess(names, environment, onEnd) });
    checkers.set(names.join(","), checker);
    checker.warm().catch((error: unknown) => log.warn("nixl-checker-failed", { error: String(error) }));
    return checker;
  }

  return {
    name: "nixl",
    capabilities,
    async createAgent(given = {}) {
      const native = open();
      requireObject(given, "KV_AGENT_INVALID", "the options of an agent");
      const { name = random.uuid(), backends: asked } = given;
      if (typeof name !== "string" || !/^[\x20-\x7e]{1,255}$/.test(name)) {
        throw new KvError(
          "KV_AGENT_INVALID",
          `agent name ${shown(name)} is not 1 to 255 printable ASCII characters`,
        );
      }
      const { backends: wanted, source } = choose(asked);
      library ??= findLibrary(options.library === undefined ? {} : { library: options.library });
      const libraryPath = await library.catch((error: unknown) => {
        library = undefined;
        throw error;
      });
      await requireWhole(libraryPath, wanted, { ...process.env, ...options.env });
      const preload = await prepareBackends(native, wanted, libraryPath);
      open();
      const checker = options.checkMetadata === true ? checkerFor(wanted, libraryPath) : undefined;
      const agent = await createNixlAgent({
        addon: native,
        libraryPath,
        name,
        backends: wanted,
        preload,
        clock,
        checkMetadata: checker?.check,
        onClose: () => agents.delete(agent),
      }).catch(async (error: unknown) => {
        const about = { wanted, source, libraryPath, environment: process.env };
        throw await explainUnavailable(error, about);
      });
      log.debug("nixl-agent-created", { name, backends: agent.backends, library: libraryPath });
      agents.add(agent);
      if (closed !== undefined) {
        await agent.close();
        throw new KvError(
          "KV_TRANSPORT_CLOSED",
          "the NIXL transport was closed while the agent was being created",
        );
      }
      return agent;
    },
    allocate(lengthBytes, given = {}) {
      requireObject(given, "KV_MEMORY_INVALID", "what memory is to be allocated");
      const { memoryType = "DRAM", deviceId = 0 } = given;
      if (memoryType !== "DRAM" || deviceId !== 0) {
        throw new KvError(
          "KV_TRANSPORT_UNSUPPORTED",
          `cannot allocate ${shown(memoryType)} on device ${shown(deviceId)}: DRAM on device 0 only`,
          memoryType === "VRAM"
            ? {
                hint: "allocate it with the device's own runtime, and register deviceMemory({ address, lengthBytes, deviceId })",
              }
            : {},
        );
      }
      return allocateMemory(open(), lengthBytes);
    },
    close() {
      closed ??= Promise.all([...agents, ...checkers.values()].map((each) => each.close())).then(() => {});
      return closed;
    },
  };
}

function checkOptions(options: NixlTransportOptions): void {
  requireObject(options, "KV_CONFIG_INVALID", "the options of nixlTransport");
  const { library, checkMetadata, env = {} } = options;
  const refuse = (name: string, value: unknown, wanted: string) => {
    throw new KvError("KV_CONFIG_INVALID", `${name} is ${shown(value)}, not ${wanted}`);
  };
  if (library !== undefined && (typeof library !== "string" || library === "")) {
    refuse("the option library", library, "a path");
  }
  if (checkMetadata !== undefined && typeof checkMetadata !== "boolean") {
    refuse("the option checkMetadata", checkMetadata, "true or false");
  }
  requireObject(env, "KV_CONFIG_INVALID", "the option env");
  for (const [name, value] of Object.entries(env)) {
    if (!/^[^=\0]+$/.test(name)) refuse("a name in the option env", name, "that of a variable");
    if (typeof value !== "string" || value.includes("\0")) refuse(`${name} of the option env`, value, "text");
  }
}

/** Variables that reach NIXL and what it loads, for the log. */
function variablesOfNixl(): Record<string, string> {
  const reach = /^(UCX|FI|NIXL)_/;
  return Object.fromEntries(
    Object.entries(process.env).filter((entry): entry is [string, string] => reach.test(entry[0])),
  );
}
