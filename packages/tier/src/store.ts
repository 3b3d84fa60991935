/** Keeps the served blocks. A slot is a block's number in the memory given to `openTier`. */
export interface BlockStore {
  /**
   * Returns each key's slot, pinned until `unpin`; undefined for a key not held. It may bring
   * blocks into memory first. After `signal` aborts, it pins nothing and the result is ignored.
   */
  pin(keys: readonly Uint8Array[], signal: AbortSignal): Promise<readonly (number | undefined)[]>;
  /** Takes one pin off each slot. */
  unpin(slots: readonly number[]): void;
}
