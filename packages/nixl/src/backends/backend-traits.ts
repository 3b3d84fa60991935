import type { BackendSpec } from "@kv/interface";

/** What is known of a NIXL backend. To add one, add a row; one without a row works, with nothing assumed. */
export interface BackendFacts {
  /** The death of a peer fails its transfers, by the backend's doing or by ours; without it only deadlines tell. */
  readonly reportsPeerDeath: boolean;
  /** It is ours: the agent keeps a connection to each peer's endpoint, and asks it before each call that would not come back. */
  readonly watchPeers: boolean;
  /** It calls a WRITE done when the bytes have left: the agent reads a byte after it, over the same connection. */
  readonly probeWrites: boolean;
  /** It reaches other agents, and carries notifications to them. Storage does not: an agent with nothing else has no metadata. */
  readonly notifies: boolean;
  /** It moves bytes between memory and files. */
  readonly files: boolean;
  /** It moves bytes between memory and objects of a store. */
  readonly objects: boolean;
  /** It reaches memory of devices (VRAM), where there is one and its runtime. */
  readonly devices: boolean;
  /** Variables that look as if they mattered to it, and do not. */
  readonly ignores: readonly string[];
}

/** It has no peer that could die, be watched or be told of anything. */
const STORAGE: BackendFacts = {
  reportsPeerDeath: true,
  watchPeers: false,
  probeWrites: false,
  notifies: false,
  files: false,
  objects: false,
  devices: false,
  ignores: [],
};

const BACKENDS: Readonly<Record<string, BackendFacts>> = {
  UCX: {
    reportsPeerDeath: true,
    watchPeers: false,
    probeWrites: false,
    notifies: true,
    files: false,
    objects: false,
    devices: true,
    ignores: ["FI_PROVIDER", "FI_PROVIDER_PATH", "FI_EFA_USE_DEVICE_RDMA"],
  },
  // Measured with NIXL 1.5.0, libfabric 2.4 and its tcp provider: a post or a notification to a peer that was killed does
  // not return, and a WRITE is done before its last bytes are in the peer's memory.
  LIBFABRIC: {
    reportsPeerDeath: true,
    watchPeers: true,
    probeWrites: true,
    notifies: true,
    files: false,
    objects: false,
    devices: true,
    ignores: ["UCX_TLS", "UCX_NET_DEVICES"],
  },
  POSIX: { ...STORAGE, files: true },
  GDS: { ...STORAGE, files: true, devices: true },
  GDS_MT: { ...STORAGE, files: true, devices: true },
  GUSLI: STORAGE,
  OBJ: { ...STORAGE, objects: true },
  AZURE_BLOB: { ...STORAGE, objects: true },
  INFINIA: STORAGE,
};

const UNKNOWN: BackendFacts = {
  reportsPeerDeath: false,
  watchPeers: false,
  probeWrites: false,
  notifies: true,
  files: false,
  objects: false,
  devices: false,
  ignores: [],
};

export const DEFAULT_BACKEND = "UCX";

export function backendFacts(name: string): BackendFacts {
  return Object.hasOwn(BACKENDS, name) ? (BACKENDS[name] ?? UNKNOWN) : UNKNOWN;
}

export function reportsPeerDeath(backends: readonly BackendSpec[]): boolean {
  return backends.every((spec) => backendFacts(spec.name).reportsPeerDeath);
}

export const notifies = (backends: readonly BackendSpec[]): boolean =>
  backends.some((spec) => backendFacts(spec.name).notifies);
