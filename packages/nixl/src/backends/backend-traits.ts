import type { BackendSpec } from "@kv/interface";
import type { Environment } from "../environment.js";

/**
 * Traits of a NIXL backend. To support a new backend, add a row below; a backend without a row gets
 * the traits of `UNKNOWN`.
 */
export interface BackendTraits {
  /**
   * Transfers fail when their peer dies, because the backend reports it or because the agent
   * watches peers. Otherwise only deadlines detect it.
   */
  readonly reportsPeerDeath: boolean;
  /**
   * The agent watches peers itself: it keeps a connection to each peer's endpoint and asks it
   * before each call that could block for ever.
   */
  readonly watchPeers: boolean;
  /**
   * The backend reports a WRITE as done when its bytes have left. The agent reads a byte after it,
   * over the same connection.
   */
  readonly probeWrites: boolean;
  /**
   * It reaches other agents and carries notifications to them. Storage does not: an agent with
   * storage alone has no metadata.
   */
  readonly notifies: boolean;
  /**
   * Small calls for the memory of peers take microseconds and wait for no peer, so they are made on
   * the JavaScript thread. Of no importance for storage.
   */
  readonly briefCalls: boolean;
  /** It moves bytes between memory and files. */
  readonly files: boolean;
  /** It moves bytes between memory and objects of a store. */
  readonly objects: boolean;
  /** It reaches device memory (`VRAM`), where there is a device and its runtime. */
  readonly devices: boolean;
  /**
   * Variables that look relevant for it, but that it does not read. A name that ends with `*`
   * stands for all that begin so.
   */
  readonly ignores: readonly string[];
  /**
   * Variables that restrict which devices and peers it can reach. A name that ends with `*` stands
   * for all that begin so.
   */
  readonly restrictedBy: readonly string[];
}

/**
 * The variables of the environment that are set and match one of the names. A name that ends with
 * `*` stands for all that begin so.
 */
export function variablesSet(environment: Environment, names: readonly string[]): string[] {
  return Object.keys(environment)
    .filter((variable) => (environment[variable] ?? "").trim() !== "")
    .filter((variable) =>
      names.some((name) =>
        name.endsWith("*") ? variable.startsWith(name.slice(0, -1)) : variable === name,
      ),
    )
    .sort();
}

/** Storage has no peer that could die, be watched or be notified. */
const STORAGE: BackendTraits = {
  reportsPeerDeath: true,
  watchPeers: false,
  probeWrites: false,
  notifies: false,
  briefCalls: true,
  files: false,
  objects: false,
  devices: false,
  ignores: [],
  restrictedBy: [],
};

/** Cautious traits: it may not report that a peer died, and its calls may wait for a peer. */
const UNKNOWN: BackendTraits = {
  ...STORAGE,
  reportsPeerDeath: false,
  notifies: true,
  briefCalls: false,
};

const BACKENDS: Readonly<Record<string, BackendTraits>> = {
  UCX: {
    ...UNKNOWN,
    reportsPeerDeath: true,
    briefCalls: true,
    devices: true,
    ignores: ["FI_PROVIDER", "FI_PROVIDER_PATH", "FI_EFA_*"],
    restrictedBy: ["UCX_TLS", "UCX_NET_DEVICES", "UCX_MEMTYPE_*"],
  },
  // Measured with NIXL 1.5.0, libfabric 2.4 and its tcp provider: a post or a notification to a
  // peer that was killed does not return, and a WRITE is done before its last bytes are in the
  // peer's memory.
  LIBFABRIC: {
    ...UNKNOWN,
    reportsPeerDeath: true,
    watchPeers: true,
    probeWrites: true,
    devices: true,
    ignores: ["UCX_TLS", "UCX_NET_DEVICES", "UCX_MEMTYPE_*"],
    restrictedBy: ["FI_PROVIDER", "FI_EFA_*"],
  },
  POSIX: { ...STORAGE, files: true },
  GDS: { ...STORAGE, files: true, devices: true },
  GDS_MT: { ...STORAGE, files: true, devices: true },
  GUSLI: STORAGE,
  OBJ: { ...STORAGE, objects: true },
  AZURE_BLOB: { ...STORAGE, objects: true },
  INFINIA: STORAGE,
};

/** The backend that is used when no setting names one. */
export const DEFAULT_BACKEND = "UCX";

/** The traits of a backend, by NIXL's name for it. Names that are not known get cautious traits. */
export function backendTraits(name: string): BackendTraits {
  return Object.hasOwn(BACKENDS, name) ? (BACKENDS[name] ?? UNKNOWN) : UNKNOWN;
}

/** Whether every one of the backends reports that a peer died. */
export function reportsPeerDeath(backends: readonly BackendSpec[]): boolean {
  return backends.every((spec) => backendTraits(spec.name).reportsPeerDeath);
}

/** Whether one of the backends carries notifications. */
export const notifies = (backends: readonly BackendSpec[]): boolean =>
  backends.some((spec) => backendTraits(spec.name).notifies);
