export { type AskNamespaceOptions, askNamespace } from "./ask-namespace.js";
export {
  type BlockHashAlgorithm,
  type BlockHashKey,
  blockHashes,
  DEFAULT_HASH_SEED,
  offloadKey,
} from "./block-hashes.js";
export { MESSAGE_FIELDS, nameOf } from "./messages.js";
export type { BlockStore } from "./server-role.js";
export type { Namespace } from "./session.js";
export { openTier, type ReadOptions, type Tier, type TierOptions } from "./tier.js";
