import type { KvCacheConfig } from "@kv/interface";

// KV is a function of prompt, layer, head and token: a check detects a byte in the wrong place.

/** Tokens `[from, until)` of a prompt in a layer, and its blocks. */
interface Tokens {
  readonly layer: number;
  readonly prompt: number;
  readonly blockIds: readonly number[];
  readonly from: number;
  readonly until: number;
}

export type RankShare = ReturnType<typeof rankShare>;

/** `[block][head][token][cell]` (LBHNC, vLLM's HND) or `[block][token][head][cell]` (LBNHC, NHD). */
export function rankShare(config: KvCacheConfig, tpRank: number, tpSize: number, dcpSize = 1) {
  const heads = Math.max(1, Math.floor(config.numKvHeads / tpSize));
  return {
    firstHead: Math.floor((tpRank * config.numKvHeads) / tpSize),
    heads,
    blockSize: config.blockSize,
    cellBytes: config.headSize * 2 * 4,
    isTokenMajor: config.layout === "LBNHC",
    /** Ranks that get the blocks of a sequence in turn. */
    dcpSize,
    dcpRank: tpRank % dcpSize,
  };
}

export function blockBytes(share: RankShare): number {
  return share.heads * share.blockSize * share.cellBytes;
}

export function writeTokens(bytes: Uint8Array, share: RankShare, at: Tokens): void {
  const words = wordsOf(bytes);
  forEachCell(share, at, (offset, word) => {
    for (let i = 0; i < share.cellBytes; i += 4) words[(offset + i) >>> 2] = mix(word + i);
  });
}

/** With `tailZeroed`, the rest of the last block must be zero. */
export function firstWrongToken(
  bytes: Uint8Array,
  share: RankShare,
  at: Tokens,
  tailZeroed: boolean,
): number | undefined {
  let wrong: number | undefined;
  const stripe = share.blockSize * share.dcpSize;
  const end = tailZeroed ? Math.ceil(at.until / stripe) * stripe : at.until;
  const words = wordsOf(bytes);
  forEachCell(share, { ...at, until: end }, (offset, word, token) => {
    for (let i = 0; i < share.cellBytes; i += 4) {
      const value = token < at.until ? mix(word + i) : 0;
      if (words[(offset + i) >>> 2] !== value)
        wrong = wrong === undefined ? token : Math.min(wrong, token);
    }
  });
  return wrong;
}

/** As 32-bit words: memory is page-aligned, and cells are multiples of 4 bytes. */
export function wordsOf(bytes: Uint8Array): Uint32Array {
  return new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength >>> 2);
}

function forEachCell(
  share: RankShare,
  at: Tokens,
  visit: (offset: number, word: number, token: number) => void,
): void {
  const { blockSize, heads, cellBytes, firstHead, isTokenMajor, dcpSize, dcpRank } = share;
  for (let token = at.from; token < at.until; token++) {
    const inSequence = Math.floor(token / blockSize);
    if (inSequence % dcpSize !== dcpRank) continue;
    const block = at.blockIds[Math.floor(inSequence / dcpSize)];
    if (block === undefined)
      throw new Error(`token ${token} has no block among ${at.blockIds.length}`);
    for (let head = 0; head < heads; head++) {
      const slot = token % blockSize;
      const cell = isTokenMajor ? slot * heads + head : head * blockSize + slot;
      const offset = (block * heads * blockSize + cell) * cellBytes;
      const word = ((at.prompt * 31 + at.layer) * 31 + firstHead + head) * 8191 + token * 64;
      visit(offset, word, token);
    }
  }
}

/** Adjacent inputs give very different words, rarely zero. */
function mix(word: number): number {
  let x = Math.imul(word ^ (word >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16) ^ 0x5bd1e995) >>> 0;
}
