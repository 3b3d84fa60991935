import { KvError } from "@kv/interface";

/** A block of one layer, and how the engine divides it over its ranks. */
export interface CanonicalLayer {
  /**
   * `packed`: K and V of a head side by side. `split`: K and V in halves of the block. `latent`:
   * one vector per token, the same on each tensor-parallel rank.
   */
  readonly form: "packed" | "split" | "latent";
  readonly order: "HND" | "NHD";
  /** KV heads of the model; 1 for latents. */
  readonly numKvHeads: number;
  /** Tokens of a block on one rank. */
  readonly blockSize: number;
  /** Bytes of K of a head for one token, or of a whole latent. */
  readonly headBytes: number;
  readonly tpSize: number;
  /** @default 1 */
  readonly dcpSize?: number;
  /** @default 1 */
  readonly pcpSize?: number;
  /** Consecutive tokens on a rank of context parallelism. @default 1 */
  readonly interleave?: number;
}

/** Where bytes of a rank's block lie in the canonical page. */
export interface CanonicalRun {
  readonly localOffset: number;
  readonly canonicalOffset: number;
  readonly lengthBytes: number;
}

/** One rank's part of a canonical page. */
export interface CanonicalPage {
  readonly pageBytes: number;
  readonly localBytes: number;
  readonly runs: readonly CanonicalRun[];
  /** Ranks with the same bytes, which take turns block by block. */
  readonly numWriters: number;
  readonly writerIndex: number;
}

/**
 * Returns where a rank's block lies in the canonical page of vLLM 0.33's offloading tiers
 * (`offloading/canonical_mapping.py`): all heads and tokens in the rank's own order, whatever TP,
 * DCP and PCP. `rank` counts tensor-parallel ranks first.
 * @throws `KV_PLAN_UNSUPPORTED` where vLLM has no canonical page either.
 */
export function canonicalPage(layer: CanonicalLayer, rank: number): CanonicalPage {
  const { form, order, blockSize, headBytes } = layer;
  const share = canonicalShare(layer, rank);
  const { heads, firstHead, allHeads, allTokens, tokenAt } = share;
  const halves = form === "split" ? 2 : 1;
  const bytes = form === "packed" ? 2 * headBytes : headBytes;
  const [outer, inner] = order === "HND" ? [heads, blockSize] : [blockSize, heads];

  const runs: CanonicalRun[] = [];
  let localOffset = 0;
  for (let half = 0; half < halves; half += 1)
    for (let row = 0; row < outer; row += 1)
      for (let column = 0; column < inner; column += 1) {
        const [head, token] = order === "HND" ? [row, column] : [column, row];
        const at =
          order === "HND"
            ? (firstHead + head) * allTokens + tokenAt(token)
            : tokenAt(token) * allHeads + firstHead + head;
        const canonicalOffset = (half * allHeads * allTokens + at) * bytes;
        append(runs, { localOffset, canonicalOffset, lengthBytes: bytes });
        localOffset += bytes;
      }
  return {
    pageBytes: halves * allHeads * allTokens * bytes,
    localBytes: localOffset,
    runs,
    numWriters: share.numWriters,
    writerIndex: share.writerIndex,
  };
}

/**
 * Heads of a rank, and the place of each of its tokens in the canonical page.
 * @throws `KV_PLAN_UNSUPPORTED`.
 */
function canonicalShare(layer: CanonicalLayer, rank: number) {
  const { form, numKvHeads, blockSize, tpSize, dcpSize = 1, pcpSize = 1, interleave = 1 } = layer;
  const cpSize = dcpSize * pcpSize;
  const shards = form === "latent" ? 1 : Math.min(tpSize, numKvHeads);
  const replication = tpSize / shards;
  const heads = numKvHeads / shards;
  if (!Number.isInteger(replication) || !Number.isInteger(heads))
    throw unsupported(`${numKvHeads} KV heads do not divide among ${tpSize} ranks`);
  if (replication % dcpSize !== 0)
    throw unsupported(
      `DCP ${dcpSize} does not divide the ${replication} ranks with the same heads`,
    );
  if (cpSize > 1 && blockSize % interleave !== 0)
    throw unsupported(`blocks of ${blockSize} tokens are not made of ${interleave} at a time`);

  const tpRank = rank % tpSize;
  const cpRank = Math.floor(rank / tpSize) * dcpSize + (tpRank % dcpSize);
  return {
    heads,
    firstHead: Math.floor(tpRank / replication) * heads,
    allHeads: numKvHeads,
    allTokens: blockSize * cpSize,
    tokenAt: (local: number) =>
      (Math.floor(local / interleave) * cpSize + cpRank) * interleave + (local % interleave),
    numWriters: replication / dcpSize,
    writerIndex: Math.floor((tpRank % replication) / dcpSize),
  };
}

function append(runs: CanonicalRun[], run: CanonicalRun): void {
  const last = runs.at(-1);
  if (last === undefined || last.canonicalOffset + last.lengthBytes !== run.canonicalOffset)
    runs.push(run);
  else runs[runs.length - 1] = { ...last, lengthBytes: last.lengthBytes + run.lengthBytes };
}

function unsupported(why: string): KvError {
  return new KvError("KV_PLAN_UNSUPPORTED", `canonical page: ${why}`, {
    hint: "vLLM keeps such blocks as each rank has them; only an engine with the same ranks reads them",
  });
}

/**
 * Proves that the ranks of `reader` get their blocks from those of `writer`, through a common
 * canonical page. Each byte, labelled by K or V, head, token and place, must be written once.
 * @throws `KV_PLAN_INVALID` with the first wrong byte, `KV_PLAN_UNSUPPORTED`.
 */
export function proveCanonical(writer: CanonicalLayer, reader: CanonicalLayer): void {
  const page = new Map<number, string>();
  const { pageBytes } = canonicalPage(reader, 0);
  const { numWriters } = canonicalPage(writer, 0);
  // Ranks with the same bytes take turns, so every turn must be right.
  for (let turn = 0; turn < numWriters; turn += 1) {
    page.clear();
    for (let rank = 0; rank < ranksOf(writer); rank += 1) {
      const { runs, writerIndex } = canonicalPage(writer, rank);
      if (writerIndex !== turn) continue;
      const labels = labelsOf(writer, rank);
      for (const { localOffset, canonicalOffset, lengthBytes } of runs)
        for (let byte = 0; byte < lengthBytes; byte += 1) {
          if (page.has(canonicalOffset + byte))
            throw wrong(`byte ${canonicalOffset + byte} is written twice, by rank ${rank} last`);
          page.set(canonicalOffset + byte, labels[localOffset + byte] ?? "nothing");
        }
    }
    if (page.size !== pageBytes)
      throw wrong(`${page.size} bytes are written, and a page has ${pageBytes}`);

    for (let rank = 0; rank < ranksOf(reader); rank += 1) {
      const labels = labelsOf(reader, rank);
      let at = 0;
      for (const { localOffset, canonicalOffset, lengthBytes } of canonicalPage(reader, rank).runs)
        for (let byte = 0; byte < lengthBytes; byte += 1, at += 1) {
          const got = page.get(canonicalOffset + byte);
          if (localOffset + byte !== at || got !== labels[at])
            throw wrong(`byte ${at} of rank ${rank} is ${labels[at]}, and ${got} arrives`);
        }
      if (at !== labels.length)
        throw wrong(`${at} bytes of rank ${rank} arrive, and its block has ${labels.length}`);
    }
  }
}

const ranksOf = ({ tpSize, pcpSize = 1 }: CanonicalLayer): number => tpSize * pcpSize;

function labelsOf(layer: CanonicalLayer, rank: number): string[] {
  const { form, order, blockSize, headBytes } = layer;
  const { heads, firstHead, tokenAt } = canonicalShare(layer, rank);
  const labels: string[] = [];
  const add = (part: string, head: number, token: number) => {
    for (let byte = 0; byte < headBytes; byte += 1)
      labels.push(`${part} of head ${firstHead + head}, token ${tokenAt(token)}, byte ${byte}`);
  };
  const parts =
    form === "latent" ? [["latent"]] : form === "packed" ? [["K", "V"]] : [["K"], ["V"]];
  const [outer, inner] = order === "HND" ? [heads, blockSize] : [blockSize, heads];
  for (const together of parts)
    for (let row = 0; row < outer; row += 1)
      for (let column = 0; column < inner; column += 1)
        for (const part of together)
          if (order === "HND") add(part, row, column);
          else add(part, column, row);
  return labels;
}

const wrong = (what: string): KvError => new KvError("KV_PLAN_INVALID", `canonical page: ${what}`);
