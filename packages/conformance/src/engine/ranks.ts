import type { KvCacheConfig, KvCaches, Memory, Transport } from "@kv/interface";

export interface GroupTokens {
  readonly prompt: number;
  readonly group: number;
  readonly blockIds: readonly number[];
  readonly from: number;
  readonly until: number;
}

const STATE_PARTS = [64, 32, 32, 128];

export function stateSpaceOf(tpSize: number): NonNullable<KvCacheConfig["stateSpace"]> {
  const [recurrentBytes = 0, ...convProjectionBytes] = STATE_PARTS.map(
    (bytes) => bytes / tpSize,
  ).toReversed();
  return { convProjectionBytes: convProjectionBytes.toReversed(), recurrentBytes };
}

function stateBytes(
  { prompt, until }: Pick<GroupTokens, "prompt" | "until">,
  layer: number,
  tpRank: number,
  tpSize: number,
): number[] {
  return STATE_PARTS.flatMap((bytes, part) => {
    const share = bytes / tpSize;
    return Array.from({ length: share }, (_, i) => {
      const word = Math.imul(((prompt * 31 + layer) * 31 + part) * 8191 + until, 2_654_435_761);
      return ((word >>> 8) + (tpRank * share + i) * 7) & 0xff;
    });
  });
}

/** The code under test cannot access simulated device memory. */
function bytesOf(memory: Memory): Uint8Array {
  return memory.memoryType === "DRAM"
    ? memory.bytes
    : (memory as Memory & { data: Uint8Array }).data;
}

const POISON = 0xdb;
const POISONED_WORD = 0xdbdbdbdb;

export type EngineRanks = ReturnType<typeof createRanks>;

/** Unused blocks have poison, bytes that no prompt's KV has. */
export function createRanks(options: {
  readonly transport: Transport;
  readonly config: KvCacheConfig;
  readonly tpSize: number;
  readonly ppSize?: number;
  readonly dcpSize?: number;
  readonly numBlocks: number;
}) {
  const { transport, config, tpSize, ppSize = 1, dcpSize = 1, numBlocks } = options;
  const layers = config.groups
    .flatMap(({ layerNames, kind, numKvHeads, blockSize = config.blockSize }, group) =>
      layerNames.map((name) => ({ name, group, numKvHeads, blockSize, isState: kind === "mamba" })),
    )
    .map((each, layer) => ({ ...each, layer }));
  const layersPerStage = Math.ceil(layers.length / ppSize);
  const ranks = Array.from({ length: ppSize * tpSize }, (_, rank) => {
    const [tpRank, firstLayer] = [rank % tpSize, Math.floor(rank / tpSize) * layersPerStage];
    return layers.slice(firstLayer, firstLayer + layersPerStage).map((each) => {
      const ofLayer = { ...config, numKvHeads: each.numKvHeads ?? config.numKvHeads };
      const share: RankShare = {
        ...rankShare(ofLayer, tpRank, tpSize, dcpSize),
        blockSize: each.blockSize,
      };
      const ofState = STATE_PARTS.reduce((sum, bytes) => sum + bytes / tpSize, 0);
      const length = each.isState ? ofState : blockBytes(share);
      const memory = transport.allocate(length * numBlocks);
      const bytes = bytesOf(memory).fill(POISON);
      return { ...each, rank, tpRank, share, length, memory, bytes };
    });
  });
  const all = ranks.flat();
  const byGroup = config.groups.map((_, group) => all.filter((each) => each.group === group));
  const ofGroup = (group: number) => byGroup[group] ?? [];
  const blocks = (group: number, blockId: number) =>
    ofGroup(group).map(({ bytes, length }) =>
      bytes.subarray(blockId * length, (blockId + 1) * length),
    );

  return {
    caches: ranks.map(
      (rank): KvCaches => ({
        config,
        regions: rank.map(({ name, group, length, memory }) => ({
          name,
          memory,
          offsetBytes: 0,
          numBlocks,
          groupId: group,
          memoryType: memory.memoryType,
          blockLengthBytes: length,
          blockStrideBytes: length,
        })),
      }),
    ),
    compute({ group, ...tokens }: GroupTokens, beforeLayer = layers.length): void {
      for (const { bytes, share, layer, isState, length, tpRank } of ofGroup(group)) {
        if (layer >= beforeLayer) continue;
        if (!isState) writeTokens(bytes, share, { layer, ...tokens });
        else if (tokens.until > 0)
          bytes.set(
            stateBytes(tokens, layer, tpRank, tpSize),
            (tokens.blockIds.at(-1) ?? 0) * length,
          );
      }
    },
    /** With `tailZeroed`, tokens behind `until` in the last block must be zero. */
    firstWrong({ group, ...tokens }: GroupTokens, tailZeroed: boolean): string | undefined {
      for (const { bytes, share, layer, rank, tpRank, isState, length } of ofGroup(group)) {
        const place = `${config.groups.length > 1 ? `group ${group}, ` : ""}rank ${rank}, layer ${layer}`;
        if (isState) {
          const at = (tokens.blockIds.at(-1) ?? 0) * length;
          const expected = stateBytes(tokens, layer, tpRank, tpSize);
          if (expected.some((byte, i) => bytes[at + i] !== byte))
            return `${place}: not the state after ${tokens.until} tokens`;
          continue;
        }
        const token = firstWrongToken(bytes, share, { layer, ...tokens }, tailZeroed);
        if (token !== undefined) return `${place}, token ${token} of ${tokens.until}`;
      }
      return undefined;
    },
    poison(group: number, blockId: number): void {
      for (const block of blocks(group, blockId)) block.fill(POISON);
    },
    /** Nothing wrote to the block since it was poisoned. */
    poisoned: (group: number, blockId: number) =>
      blocks(group, blockId).every((block) =>
        wordsOf(block).every((word) => word === POISONED_WORD),
      ),
    close(): void {
      for (const { memory } of all) memory.close();
    },
  };
}

// KV is a function of prompt, layer, head and token: a check detects a byte in the wrong place.

/** Tokens `[from, until)` of a prompt in a layer, and its blocks. */
interface Tokens {
  readonly layer: number;
  readonly prompt: number;
  readonly blockIds: readonly number[];
  readonly from: number;
  readonly until: number;
}

type RankShare = ReturnType<typeof rankShare>;

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
function wordsOf(bytes: Uint8Array): Uint32Array {
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
