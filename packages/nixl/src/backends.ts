import type { BackendSpec } from "@kv/interface";

/** What is known of a NIXL backend. To add one, add a row; one without a row works, with nothing assumed. */
export interface BackendFacts {
  /** The death of a peer fails its transfers; without it only deadlines tell. */
  readonly reportsPeerDeath: boolean;
  /** Variables that look as if they mattered to it, and do not. */
  readonly ignores: readonly string[];
}

const BACKENDS: Readonly<Record<string, BackendFacts>> = {
  UCX: { reportsPeerDeath: true, ignores: ["FI_PROVIDER"] },
  // Measured with the tcp provider: a transfer from a killed peer stays in progress.
  LIBFABRIC: { reportsPeerDeath: false, ignores: [] },
};

const UNKNOWN: BackendFacts = { reportsPeerDeath: false, ignores: [] };

export const DEFAULT_BACKEND = "UCX";

export function backendFacts(name: string): BackendFacts {
  return Object.hasOwn(BACKENDS, name) ? (BACKENDS[name] ?? UNKNOWN) : UNKNOWN;
}

export function reportsPeerDeath(backends: readonly BackendSpec[]): boolean {
  return backends.every((spec) => backendFacts(spec.name).reportsPeerDeath);
}
