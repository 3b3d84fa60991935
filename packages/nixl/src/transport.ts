import { setTimeout as sleep } from "node:timers/promises";
import {
  type AgentOptions,
  type Ambient,
  type AmbientOptions,
  ambient,
  type BackendSpec,
  KvError,
  type Memory,
  type MemoryType,
  settleAll,
  type Transport,
  type TransportCapabilities,
} from "@kv/interface";
import { loadAddon } from "./addon/load-addon.js";
import type { NativeAddon } from "./addon/native.js";
import { callNative } from "./addon/native-errors.js";
import { CLOSE_TIMEOUT_MS, type NixlAgent, startNixlAgent } from "./agent/agent.js";
import type { AgentCore } from "./agent/agent-core.js";
import { explainBackendError, explainRefusedPeer } from "./backends/backend-errors.js";
import { notifies, reportsPeerDeath } from "./backends/backend-traits.js";
import { PreloadFinder } from "./backends/plugins.js";
import { rdmaDevices, warnOfUcxOnEfa } from "./backends/rdma-devices.js";
import {
  type SelectedBackends,
  selectBackends,
  validateAgentBackends,
} from "./backends/select-backends.js";
import { nixlVariables, warnOfUnusedLibraryVariables } from "./environment.js";
import { realHost } from "./host.js";
import { findLibrary } from "./library/find-library.js";
import { requireComplete } from "./library/truncation-check.js";
import { allocateDeviceMemory } from "./memory/device-memory.js";
import { allocateHostMemory } from "./memory/host-memory.js";
import { memoryTypesOf } from "./memory/memory-types.js";
import { MetadataChecker, startCheckerProcess } from "./metadata/checker.js";
import { formatValue, requireObject, requireOptions } from "./validate.js";

/** Options of `nixlTransport`. */
export interface NixlTransportOptions extends AmbientOptions {
  /** Path of `libnixl_capi.so`, tried before all other places. */
  readonly library?: string | undefined;
  /**
   * Backends of agents that name none, in order of preference. @default `NIXL_BACKEND`, else UCX
   */
  readonly backends?: readonly (BackendSpec | string)[] | undefined;
  /**
   * Loads each peer's metadata first in another process, once per content, because NIXL crashes on
   * some damaged metadata. Only a seal or a signature makes that unnecessary. Costs one process per
   * combination of backends. @default false
   */
  readonly checkMetadata?: boolean | undefined;
  /**
   * Variables for NIXL, UCX and libfabric, such as `UCX_TLS`. They are set in the environment of
   * the process before NIXL loads.
   */
  readonly env?: Readonly<Record<string, string>> | undefined;
}

/** Options of `NixlTransport.createAgent`. */
export interface NixlCreateAgentOptions extends AgentOptions {
  /**
   * NIXL measures each request, and results of transfers have `nixl`. `NIXL_TELEMETRY_ENABLE` in
   * the environment comes first: "n" switches this off, and NIXL logs a warning. With
   * `NIXL_TELEMETRY_EXPORTER` NIXL also exports its counters. @default false
   */
  readonly captureTelemetry?: boolean | undefined;
}

/** Options of `NixlTransport.allocate`. */
export interface NixlAllocateOptions {
  /** `DRAM`, or `VRAM` for memory of an NVIDIA GPU. @default "DRAM" */
  readonly memoryType?: MemoryType | undefined;
  /** Ordinal of the GPU as this process counts them; 0 for `DRAM`. @default 0 */
  readonly deviceId?: number | undefined;
  /** Touch all pages of host memory in the background. @default true */
  readonly populate?: boolean | undefined;
}

/**
 * NIXL as a `Transport`. It loads nothing before the first agent or allocation, which may fail with
 * `KV_ADDON_NOT_FOUND`, `KV_LIBRARY_NOT_FOUND`, `KV_LIBRARY_INCOMPATIBLE` or
 * `KV_BACKEND_UNAVAILABLE`. Throws `KV_CONFIG_INVALID` for wrong options, and
 * `KV_BACKEND_UNAVAILABLE` or `KV_AGENT_INVALID` for wrong `backends`.
 */
export function nixlTransport(options: NixlTransportOptions = {}): NixlTransport {
  requireTransportOptions(options);
  return new NixlTransport(options);
}

/**
 * What `nixlTransport` returns. Methods are bound, so a wrapper may copy them with
 * `{ ...transport }`.
 */
export class NixlTransport implements Transport, AsyncDisposable {
  readonly name = "nixl";
  /** What agents of the transport's own backends can do here. `VRAM` needs an NVIDIA GPU. */
  readonly capabilities: TransportCapabilities;
  readonly #options: NixlTransportOptions;
  readonly #ambient: Ambient;
  readonly #agents = new Set<AgentCore>();
  readonly #preloads = new PreloadFinder();
  /** A process without a peer's backend would refuse the peer's metadata. */
  readonly #checkers = new Map<string, MetadataChecker>();
  readonly #logged = new Set<string>();
  #addon: NativeAddon | undefined;
  #environmentReady: Promise<void> | undefined;
  #library: Promise<string> | undefined;
  #closed: Promise<void> | undefined;

  constructor(options: NixlTransportOptions) {
    const { backends } = selectBackends({ explicit: options.backends, environment: process.env });
    this.#options = options;
    this.#ambient = ambient(options);
    this.capabilities = Object.freeze({
      read: true,
      write: true,
      notifications: notifies(backends),
      crossProcess: true,
      memoryTypes: memoryTypesOf(backends),
      reportsPeerDeath: reportsPeerDeath(backends),
    });
  }

  /**
   * Starts an agent with its native thread and backends. Rejects with `KV_AGENT_INVALID` for wrong
   * options, `KV_TRANSPORT_CLOSED`, `KV_BACKEND_UNAVAILABLE` (with every plugin, what it lacks and
   * the remedy), and the errors of loading the addon and NIXL.
   */
  readonly createAgent = async (options: NixlCreateAgentOptions = {}): Promise<NixlAgent> => {
    const place = placeOfCall();
    const addon = this.#open();
    const { random, log } = this.#ambient;
    requireOptions(options, "KV_AGENT_INVALID", "the options of an agent", [
      "name",
      "backends",
      "backendsSetting",
      "captureTelemetry",
    ]);
    const { name = random.uuid(), backends: asked, captureTelemetry = false } = options;
    if (typeof name !== "string" || !/^[\x20-\x7e]{1,255}$/.test(name)) {
      throw new KvError(
        "KV_AGENT_INVALID",
        `agent name ${formatValue(name)} is not 1 to 255 printable ASCII characters`,
      );
    }
    if (typeof captureTelemetry !== "boolean") {
      throw new KvError(
        "KV_AGENT_INVALID",
        `captureTelemetry is ${formatValue(captureTelemetry)}, not true or false`,
      );
    }
    // First: later steps would report a lack of descriptors as a missing or damaged file.
    callNative(() => addon.requireDescriptors(AGENT_DESCRIPTORS, `the agent "${name}"`));
    const { backends, source } = this.#selectBackends(asked, options.backendsSetting);
    await this.#prepareEnvironment(addon);
    const libraryPath = await this.#findLibrary();
    const preload = await this.#prepareBackends(addon, backends, libraryPath);
    this.#requireOpen();
    const checks = this.#options.checkMetadata === true;
    // Started early, so that the first check does not wait for it.
    if (checks) this.#checkerFor(backends, libraryPath);
    const explain = async (error: unknown, specs: readonly BackendSpec[]) => {
      this.#preloads.forget();
      return await explainBackendError(error, {
        backends: specs,
        source,
        libraryPath,
        environment: process.env,
      });
    };
    const { agent, core } = await startNixlAgent({
      addon,
      libraryPath,
      name,
      place,
      backends,
      preload,
      captureTelemetry,
      ambient: this.#ambient,
      prepareBackends: (added) => this.#prepareBackends(addon, added, libraryPath),
      explainBackendError: explain,
      checkMetadata: checks
        ? (metadata, specs) => this.#checkerFor(specs, libraryPath).check(metadata)
        : undefined,
      explainRefusedPeer: (error, specs) =>
        explainRefusedPeer(error, {
          backends: specs,
          environment: process.env,
          devices: rdmaDevices(realHost()),
        }),
      onClose: (closed) => void this.#agents.delete(closed),
    }).catch(async (error: unknown) => {
      throw await explain(error, backends);
    });
    log.debug("nixl-agent-created", { name, backends: agent.backends, library: libraryPath });
    this.#agents.add(core);
    if (this.#closed !== undefined) {
      await core.close(CLOSE_TIMEOUT_MS);
      throw new KvError(
        "KV_TRANSPORT_CLOSED",
        "the NIXL transport was closed while the agent was being created",
      );
    }
    return agent;
  };

  /**
   * Allocates host memory, or zeroed memory of an NVIDIA GPU. Host pages are touched in the
   * background, so they take memory at once. With `populate: false` a page takes memory on first
   * use, and its first transfer is up to 20 times slower. GPU memory has no `bytes`: `gather` and
   * `scatter` copy. Throws `KV_MEMORY_INVALID`, `KV_TRANSPORT_CLOSED`, and
   * `KV_TRANSPORT_UNSUPPORTED` for other kinds of memory and without a CUDA driver or such a GPU.
   */
  readonly allocate = (
    lengthBytes: number,
    options: NixlAllocateOptions = {},
  ): Memory & Disposable => {
    requireOptions(options, "KV_MEMORY_INVALID", "the options of allocate", [
      "memoryType",
      "deviceId",
      "populate",
    ]);
    const { memoryType = "DRAM", deviceId = 0, populate = true } = options;
    if (typeof populate !== "boolean") {
      throw new KvError(
        "KV_MEMORY_INVALID",
        `populate is ${formatValue(populate)}, not true or false`,
      );
    }
    if (memoryType === "VRAM") return allocateDeviceMemory(this.#open(), lengthBytes, deviceId);
    if (memoryType !== "DRAM" || deviceId !== 0) {
      throw new KvError(
        "KV_TRANSPORT_UNSUPPORTED",
        `cannot allocate ${formatValue(memoryType)} on device ${formatValue(deviceId)}: DRAM on device 0, or VRAM of an NVIDIA GPU`,
      );
    }
    return allocateHostMemory(this.#open(), lengthBytes, { populate });
  };

  /** Closes all agents and the processes that check metadata. Safe to call twice. */
  readonly close = (): Promise<void> => {
    this.#closed ??= settleAll([
      ...Array.from(this.#agents, (core) => core.close(CLOSE_TIMEOUT_MS)),
      ...Array.from(this.#checkers.values(), (checker) => checker.close()),
    ]);
    return this.#closed;
  };

  readonly [Symbol.asyncDispose] = (): Promise<void> => this.close();

  /** One that fails does not end the wait for the others, whose memory is still in use. */
  #requireOpen(): void {
    if (this.#closed === undefined) return;
    throw new KvError("KV_TRANSPORT_CLOSED", "the NIXL transport is closed");
  }

  #open(): NativeAddon {
    this.#requireOpen();
    if (this.#addon !== undefined) return this.#addon;
    const { library } = this.#options;
    warnOfUnusedLibraryVariables({ library, environment: process.env, log: this.#ambient.log });
    this.#addon = loadAddon();
    return this.#addon;
  }

  #prepareEnvironment(addon: NativeAddon): Promise<void> {
    this.#environmentReady ??= (async () => {
      const { log } = this.#ambient;
      const variables = Object.entries(this.#options.env ?? {});
      if (variables.length > 0 && addon.isLoaded()) {
        log.warn("nixl-environment-late", {
          variables,
          why: "NIXL is loaded in this process already",
        });
      }
      for (const [name, value] of await setVariables(addon, variables)) {
        log.info("nixl-environment-default", { name, value });
      }
    })();
    return this.#environmentReady;
  }

  /** Logs each selection once. */
  #selectBackends(
    asked: readonly BackendSpec[] | undefined,
    setting = "the agent's backends",
  ): SelectedBackends {
    const { log, metrics } = this.#ambient;
    const settings = {
      explicit: asked === undefined ? this.#options.backends : validateAgentBackends(asked),
      option: asked === undefined ? "the option backends" : setting,
      environment: process.env,
    };
    const selected = selectBackends(settings);
    const { backends, source } = selected;
    const names = backends.map((spec) => spec.name).join(",");
    if (!this.#logged.has(`${names} ${source}`)) {
      this.#logged.add(`${names} ${source}`);
      selectBackends({ ...settings, log });
      log.info("nixl-backends", { backends: names, source, variables: nixlVariables(process.env) });
      warnOfUcxOnEfa(backends, log);
    }
    metrics.count("kv_nixl_agents_created", 1, { backends: names, source });
    return selected;
  }

  /** Looks again after a failure. */
  async #findLibrary(): Promise<string> {
    this.#library ??= findLibrary({ library: this.#options.library });
    try {
      return await this.#library;
    } catch (error) {
      this.#library = undefined;
      throw error;
    }
  }

  /**
   * Returns paths of libraries from outside the wheel that the backends' plugins need, and sets
   * their variables.
   */
  async #prepareBackends(
    addon: NativeAddon,
    backends: readonly BackendSpec[],
    libraryPath: string,
  ): Promise<string[]> {
    await requireComplete(libraryPath, backends, { ...process.env, ...this.#options.env });
    const paths: string[] = [];
    for (const { name } of backends) {
      const { libraries, variables } = await this.#preloads.find(name, libraryPath, process.env);
      if (libraries.length === 0) continue;
      paths.push(...libraries);
      const unset = variables.filter(([variable]) => process.env[variable] === undefined);
      if (unset.length > 0) await setVariables(addon, unset);
      this.#ambient.log.debug("nixl-libraries-supplied", { backend: name, libraries });
    }
    return paths;
  }

  #checkerFor(backends: readonly BackendSpec[], libraryPath: string): MetadataChecker {
    const names = backends.map((spec) => spec.name);
    const existing = this.#checkers.get(names.join(","));
    if (existing !== undefined) return existing;
    const { clock, log } = this.#ambient;
    const environment = { ...process.env, ...this.#options.env, KV_NIXL_LIBRARY: libraryPath };
    const checker = new MetadataChecker({
      clock,
      startProcess: (onEnd) => startCheckerProcess(names, environment, onEnd),
    });
    this.#checkers.set(names.join(","), checker);
    checker
      .warm()
      .catch((error: unknown) => log.warn("nixl-checker-failed", { error: String(error) }));
    return checker;
  }
}

/**
 * File descriptors that must be free for an agent. UCX takes 13 with one network device; other
 * devices, peers and the loading of libraries take more.
 */
const AGENT_DESCRIPTORS = 40;

/** How often to look whether an agent is still being created, which takes up to 0.7 s. */
const BUSY_WAIT_MS = 5;

/** Waits until no agent is being created. Returns NIXL's defaults that were set. */
async function setVariables(
  addon: NativeAddon,
  variables: readonly (readonly [string, string])[],
): Promise<[name: string, value: string][]> {
  for (;;) {
    const set = addon.prepareEnvironment(variables.map(([name, value]) => [name, value]));
    if (set !== undefined) return set;
    await sleep(BUSY_WAIT_MS);
  }
}

function placeOfCall(): string {
  const lines = new Error().stack?.split("\n").slice(3) ?? [];
  return lines.map((line) => line.trim().replace(/^at /, "")).join(" < ");
}

function requireTransportOptions(options: NixlTransportOptions): void {
  requireOptions(options, "KV_CONFIG_INVALID", "the options of nixlTransport", [
    "library",
    "backends",
    "checkMetadata",
    "env",
    "clock",
    "random",
    "log",
    "metrics",
    "tracer",
  ]);
  const { library, checkMetadata, env = {} } = options;
  const refuse = (name: string, value: unknown, expected: string) => {
    throw new KvError("KV_CONFIG_INVALID", `${name} is ${formatValue(value)}, not ${expected}`);
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
    if (typeof value !== "string" || value.includes("\0"))
      refuse(`${name} of the option env`, value, "text");
  }
}
