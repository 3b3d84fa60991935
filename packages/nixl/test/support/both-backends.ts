import { libfabricMissing } from "./libfabric-available.js";
import { nixlMissing } from "./nixl-available.js";

/** The backends that keep the same promises, and why one of them cannot be tried here. */
export const BOTH_BACKENDS = [
  { backend: "UCX", missing: nixlMissing },
  { backend: "LIBFABRIC", missing: libfabricMissing },
] as const;
