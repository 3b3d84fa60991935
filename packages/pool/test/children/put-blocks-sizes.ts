export const NAMESPACE = { blockLengthBytes: 65_536, fingerprint: "f", hashSeed: "s" };
/** Prefixes, and blocks in each. */
export const CHAINS = 12;
export const CHAIN = 4;
export const PLACES = 24;
export const SLOTS = 16;
