import type { BackendSpec } from "@kv/interface";
import type { NativeBackends, NativeParameterSet } from "../addon/native.js";
import { backendTraits, notifies } from "./backend-traits.js";

/** What a plugin or a backend of NIXL states of itself. */
export interface BackendParameters {
  /** Memory types that it registers, by NIXL's names without `_SEG`. */
  readonly memoryTypes: readonly string[];
  /**
   * Parameters by name. Of a plugin: those that it knows, with their defaults. Of a backend: those
   * that it was created with.
   */
  readonly parameters: Readonly<Record<string, string>>;
}

/** The addon's answer as an object. */
export function backendParametersOf([
  memoryTypes,
  parameters,
]: NativeParameterSet): BackendParameters {
  return { memoryTypes, parameters: Object.fromEntries(parameters) };
}

/**
 * Backends for the addon. `preload`: paths of libraries that they need and the loader does not
 * find.
 */
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
