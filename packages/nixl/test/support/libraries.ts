import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";

/**
 * A library that a suite runs with: options of `nixlTransport`, and why it is missing. Each needs a
 * process of its own.
 */
export interface Library {
  readonly options: { readonly library?: string; readonly backends: readonly string[] };
  readonly missing: string | undefined;
}

/** The real NIXL over UCX. */
export const REAL: Library = { options: { backends: ["UCX"] }, missing: nixlMissing };
/** The fake of `native/fake`, which ends the process where the addon breaks a rule of NIXL. */
export const FAKE: Library = {
  options: { library: FAKE_NIXL, backends: ["UCX"] },
  missing: fakeMissing,
};
