import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { libfabricMissing } from "./libfabric-available.js";

/**
 * The backends that must pass the same tests, and the reason why one cannot be tested on this
 * machine.
 */
export const BOTH_BACKENDS = [
  { backend: "UCX", missing: nixlMissing },
  { backend: "LIBFABRIC", missing: libfabricMissing },
] as const;
