import type { BackendSpec } from "@kv/interface";
import type { NativeBackends } from "../addon/native.js";
import type { Environment } from "../environment.js";
import TRAITS from "./backend-traits.json" with { type: "json" };

/** Traits of a NIXL backend. */
export interface BackendTraits {
  /** Transfers fail when their peer dies; otherwise only deadlines detect it. */
  readonly reportsPeerDeath: boolean;
  /**
   * The agent keeps a connection to each peer's endpoint and checks it before each call that could
   * block for ever.
   */
  readonly watchPeers: boolean;
  /**
   * The backend reports a WRITE when its bytes have left, so the agent reads a byte after it over
   * the same connection.
   */
  readonly probeWrites: boolean;
  /** An agent whose backends carry no notifications (storage) has no metadata. */
  readonly notifies: boolean;
  /**
   * Small calls for a peer's memory take microseconds and wait for no peer, so they run on the
   * JavaScript thread.
   */
  readonly briefCalls: boolean;
  readonly files: boolean;
  readonly objects: boolean;
  /** `VRAM` also needs a device and its runtime. */
  readonly devices: boolean;
  /** Variables that look relevant but that it does not read; a final `*` stands for any rest. */
  readonly ignores: readonly string[];
  /**
   * Variables that restrict which devices and peers it can reach; a final `*` stands for any rest.
   */
  readonly restrictedBy: readonly string[];
}

/** A final `*` in a name stands for any rest. */
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

/**
 * By name. `unknown` is cautious: it may not report that a peer died, and its calls may wait for a
 * peer. LIBFABRIC is measured with NIXL 1.5.0, libfabric 2.4 and its tcp provider: a post or a
 * notification to a killed peer does not return, and a WRITE is done before its last bytes arrive.
 */
const BACKENDS: ReadonlyMap<string, BackendTraits> = new Map(Object.entries(TRAITS));

export const DEFAULT_BACKEND = "UCX";

export function backendTraits(name: string): BackendTraits {
  return BACKENDS.get(name) ?? TRAITS.unknown;
}

export function reportsPeerDeath(backends: readonly BackendSpec[]): boolean {
  return backends.every((spec) => backendTraits(spec.name).reportsPeerDeath);
}

export const notifies = (backends: readonly BackendSpec[]): boolean =>
  backends.some((spec) => backendTraits(spec.name).notifies);

/** `preload`: paths of libraries that the loader does not find. */
export function nativeBackendsOf(
  backends: readonly BackendSpec[],
  preload: readonly string[],
): NativeBackends {
  const traits = backends.map((spec) => backendTraits(spec.name));
  return {
    backends: backends.map(({ name, parameters = {} }) => ({
      name,
      parameters: Object.entries(parameters),
    })),
    preload,
    watchPeers: traits.some(({ watchPeers }) => watchPeers),
    probeWrites: traits.some(({ probeWrites }) => probeWrites),
    notifies: notifies(backends),
    briefCalls: traits.every((backend) => backend.briefCalls),
  };
}
