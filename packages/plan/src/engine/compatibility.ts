import type { KvCacheKind } from "@kv/interface";
import { tpRatio } from "@kv/topology";
import { incompatible, unsupported } from "../errors.js";
import { hasPlainTokens, orderOfBlock, orderOfLayout } from "../geometry/block-format.js";
import { checkModelGeometry, checkRankGeometry } from "../geometry/geometry-checks.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { requireStatesFit } from "../kinds/mamba.js";
import { cacheKind } from "../kinds/registry.js";
import { mappingsByHeads } from "./mappings.js";
import type { BlockParts } from "./pieces.js";
import {
  attentionGroups,
  groupsOfRegion,
  headsInBlock,
  headsInRegion,
  headsOfGroup,
  kindOf,
  whyWhole,
} from "./region-heads.js";

/**
 * What only the engine can do after a receive. `attention-order`: attention backends differ, so the
 * order inside a head may. `hnd-to-nhd`: head-major to token-major (vLLM:
 * `enable_permute_local_kv`).
 */
export type ReceiveConversion = "attention-order" | "hnd-to-nhd";

/** Input of `checkCompatibility`. */
export interface CompatibilityOptions extends ModelGeometry {
  readonly local: RankGeometry;
  readonly remote: RankGeometry;
  /** Conversions that the local engine can do after a receive. @default none */
  readonly conversions?: readonly ReceiveConversion[] | undefined;
  /**
   * Groups with their own block tables share memory, which excludes conversions. @default true for
   * more than one group
   */
  readonly hybridCache?: boolean | undefined;
  /** Matters only for state-space models. @default true */
  readonly prefixCaching?: boolean | undefined;
}

/** What follows from a compatible pair of ranks. */
export interface PairFacts {
  /** `localParts`: where remote kernel blocks are smaller, how many are in a local one. */
  readonly blockSizeRatio: number;
  /** Parts of a local kernel block; local and remote parts hold equally many tokens. */
  readonly localParts: number;
  readonly remoteParts: number;
  /** 1 for MLA. */
  readonly localHeads: number;
  readonly remoteHeads: number;
  readonly conversions: readonly ReceiveConversion[];
}

/**
 * Accepts or refuses a pair of ranks, as vLLM 0.33's `_validate_remote_agent_handshake`. Unlike
 * vLLM it refuses to cut blocks of unknown order, and accepts bytes that a plan can put in order.
 * Errors have both values: `KV_TOPOLOGY_INVALID`, `KV_PLAN_INVALID`, `KV_PLAN_INCOMPATIBLE`,
 * `KV_PLAN_UNSUPPORTED`.
 */
export function checkCompatibility(options: CompatibilityOptions): PairFacts {
  const { local, remote, groups, numKvHeads } = options;
  checkModelGeometry(options);
  checkRankGeometry("the local rank", local, options);
  checkRankGeometry(`remote rank ${remote.tpRank}`, remote, options);
  checkDcp(local, remote, groups);
  tpRatio(local.tpSize, remote.tpSize);
  const parts = partsOf(local, remote);
  const isMla = isMlaModel(groups);
  if (parts.remoteParts > 1 && !isMla) checkWholeHeads(options);
  const heads = isMla ? undefined : numKvHeads;
  const facts = {
    blockSizeRatio: parts.localParts,
    ...parts,
    localHeads: headsInBlock(local, heads),
    remoteHeads: headsInBlock(remote, heads),
  };
  const conversions = isMla ? [] : layoutConversion(options);
  if (local.attentionBackend !== remote.attentionBackend)
    conversions.push(backendConversion(options));
  checkStateSpace(options);
  checkRegions(options, parts, isMla);
  return Object.freeze({ ...facts, conversions: Object.freeze(conversions) });
}

/** A draft model's attention may differ from the target model's. */
export function isMlaModel(groups: readonly KvCacheKind[]): boolean {
  return groups.some((name) => {
    const kind = cacheKind(name);
    return kind.sharding === "replicated" && kind.extent !== "whole";
  });
}

function hasState(groups: readonly KvCacheKind[]): boolean {
  return groups.some((name) => cacheKind(name).sharding === "state");
}

function checkDcp(local: RankGeometry, remote: RankGeometry, groups: readonly KvCacheKind[]): void {
  const [mine, theirs] = [local.dcpSize ?? 1, remote.dcpSize ?? 1];
  if (mine % theirs !== 0 && theirs % mine !== 0)
    throw incompatible("DCP sizes must divide one another", mine, theirs);
  if (mine !== theirs && hasState(groups))
    throw unsupported("state-space caches need equal DCP sizes", mine, theirs);
  const logical = (rank: RankGeometry) => rank.kernelBlockSize * rank.physicalBlocksPerLogical;
  if ((mine === 1 && theirs === 1) || logical(local) === logical(remote)) return;
  throw unsupported(
    "blocks that DCP ranks share must hold equally many tokens on both sides",
    logical(local),
    logical(remote),
  );
}

function partsOf(local: RankGeometry, remote: RankGeometry): BlockParts {
  let [unit, rest] = [local.kernelBlockSize, remote.kernelBlockSize];
  while (rest > 0) [unit, rest] = [rest, unit % rest];
  return { localParts: local.kernelBlockSize / unit, remoteParts: remote.kernelBlockSize / unit };
}

/** Remote blocks (vLLM never cuts them) are cut by head, so ranks need whole heads. */
function checkWholeHeads({ local, remote, numKvHeads }: CompatibilityOptions): void {
  for (const { tpSize } of [local, remote]) {
    if (numKvHeads % tpSize === 0 || tpSize % numKvHeads === 0) continue;
    throw unsupported(
      "block sizes that do not divide one another need KV heads that divide over the ranks",
      `${numKvHeads} KV heads`,
      `TP ${tpSize}`,
      "use block sizes of which the remote's divides the local one, or a TP size that divides the heads",
    );
  }
}

const isHybrid = ({ hybridCache, groups }: CompatibilityOptions) =>
  hybridCache ?? groups.length > 1;

function layoutConversion(options: CompatibilityOptions): ReceiveConversion[] {
  const { local, remote, conversions = [] } = options;
  if (local.layout === remote.layout) return [];
  const turned = remote.layout === "LBHNC" && local.layout === "LBNHC";
  if (turned && conversions.includes("hnd-to-nhd") && !isHybrid(options)) return ["hnd-to-nhd"];
  const orders = [orderOfLayout(local.layout), orderOfLayout(remote.layout)];
  const isOpaque = orders.includes("opaque");
  if (!isOpaque && (orders[0] === orders[1] || hasPlainTokens(local, remote))) return [];
  throw incompatible(
    "the KV cache layouts differ, and descriptors cannot put the bytes in order: " +
      (isOpaque
        ? "one layout spreads the heads of a block over memory"
        : "the attention backend has an order of tokens of its own"),
    local.layout,
    remote.layout,
    "use one layout on both sides",
  );
}

function backendConversion(options: CompatibilityOptions): ReceiveConversion {
  const { local, remote, conversions = [] } = options;
  if (!conversions.includes("attention-order")) {
    throw incompatible(
      "the attention backends differ, so the order inside a head may differ",
      local.attentionBackend,
      remote.attentionBackend,
      'use one backend on both sides, or an engine that declares the conversion "attention-order"',
    );
  }
  if (!hasPlainTokens(local) && isHybrid(options)) {
    throw unsupported(
      'conversion "attention-order" does not support KV cache groups that share memory',
      `${local.layout} on ${local.attentionBackend}`,
      `${remote.layout} on ${remote.attentionBackend}`,
    );
  }
  return "attention-order";
}

function checkStateSpace(options: CompatibilityOptions): void {
  const { local, remote, groups, prefixCaching = true } = options;
  const states = [...local.regions.keys()].filter((index) =>
    groupsOfRegion(local, local.regions[index] as RegionGeometry, options).some(
      (group) => kindOf(options, group).sharding === "state",
    ),
  );
  requireStatesFit("the local rank", local, states);
  requireStatesFit(`remote rank ${remote.tpRank}`, remote, states);
  const [mine, theirs] = [local.physicalBlocksPerLogical, remote.physicalBlocksPerLogical];
  if (!hasState(groups) || mine === theirs || !prefixCaching) return;
  throw unsupported(
    "prefix caching of a state-space model needs equal kernel blocks per logical block",
    mine,
    theirs,
    "disable prefix caching, or choose equal block sizes",
  );
}

function checkRegions(
  options: CompatibilityOptions,
  { localParts, remoteParts }: BlockParts,
  isMla: boolean,
): void {
  const { local, remote, groups } = options;
  const [mine, theirs] = [local.regions, remote.regions];
  if (mine.length !== theirs.length) {
    throw incompatible(
      `numbers of regions differ${onlyOn("the local rank", mine, theirs)}${onlyOn("the remote rank", theirs, mine)}`,
      mine.length,
      theirs.length,
      "a draft model on one side only is the usual cause: give both engines the same --speculative-config",
    );
  }
  // The state decides the size of a hybrid's page; only with MLA are pages comparable.
  const arePages = isMla || !hasState(groups);
  for (const [index, region] of mine.entries()) {
    const other = theirs[index];
    if (region.name !== other?.name) {
      throw incompatible(
        `region ${index} must name the same cache on both sides`,
        region.name,
        other?.name ?? null,
      );
    }
    const heads = headsInRegion(local, region, options);
    const cut: RegionCut = {
      region,
      heads,
      localHeads: headsInBlock(local, heads),
      remoteHeads: headsInBlock(remote, heads),
      isCut: localParts > 1 || remoteParts > 1,
    };
    checkSameShares(options, cut);
    checkWhole(options, cut);
    const hasAttention = attentionGroups(local, region, options).length > 0;
    if (hasAttention) checkOrder(options, cut);
    const isComparable = arePages && hasAttention;
    const [inLocal, inRemote] = [cut.localHeads * localParts, cut.remoteHeads * remoteParts];
    if (!isComparable || region.blockLengthBytes * inRemote === other.blockLengthBytes * inLocal)
      continue;
    throw incompatible(
      `region ${index} "${region.name}": block lengths do not fit ${cut.localHeads} local and ${cut.remoteHeads} remote heads ` +
        `at ${localParts} and ${remoteParts} equal parts of a block`,
      region.blockLengthBytes,
      other.blockLengthBytes,
    );
  }
}

const MAX_NAMES = 8;

function onlyOn(
  side: string,
  own: readonly RegionGeometry[],
  others: readonly RegionGeometry[],
): string {
  const known = new Set(others.map(({ name }) => name));
  const names = own.flatMap(({ name }) => (known.has(name) ? [] : [`"${name}"`]));
  if (names.length === 0) return "";
  const more = names.length > MAX_NAMES ? ` and ${names.length - MAX_NAMES} more` : "";
  return `; only ${side} has ${names.slice(0, MAX_NAMES).join(", ")}${more}`;
}

interface RegionCut {
  readonly region: RegionGeometry;
  /** Undefined where every rank holds the same bytes. */
  readonly heads: number | undefined;
  readonly localHeads: number;
  readonly remoteHeads: number;
  /** Kernel blocks of different sizes are cut by token. */
  readonly isCut: boolean;
}

/**
 * Groups that share a region use the same descriptors, so sources must hold the same share of each.
 */
function checkSameShares(
  model: CompatibilityOptions,
  { region, heads, localHeads, remoteHeads }: RegionCut,
): void {
  const { local, remote } = model;
  for (const group of attentionGroups(local, region, model)) {
    const own = headsOfGroup(region, group, model);
    if (own === heads) continue;
    const mapping = mappingsByHeads(local, remote, model);
    const [dealt, ranks] = [mapping(own), mapping(heads)];
    const isSame =
      headsInBlock(local, own) / headsInBlock(remote, own) === localHeads / remoteHeads &&
      dealt.rankOffsetFactor === ranks.rankOffsetFactor &&
      dealt.attentionRanks.join() === ranks.attentionRanks.join();
    if (isSame) continue;
    const inBlock = (rank: RankGeometry, most: number) =>
      `${headsInBlock(rank, own)} heads of group ${group} in a block, ${most} of another`;
    throw unsupported(
      `region "${region.name}" is shared by groups whose KV heads are split over the ranks differently`,
      inBlock(local, localHeads),
      inBlock(remote, remoteHeads),
      "use equal TP sizes, or sizes that divide the heads of each group",
    );
  }
}

/**
 * Blocks that are not heads × tokens × cells only move whole, into blocks of the same order (vLLM
 * 0.33 refuses only NVFP4, and only by head).
 */
function checkWhole(
  model: CompatibilityOptions,
  { region, heads, localHeads, remoteHeads, isCut }: RegionCut,
): void {
  const { local, remote } = model;
  const why = whyWhole(local, remote, region, model);
  if (why === undefined) return;
  const refused = (what: string, mine: string, theirs: string, hint: string) =>
    unsupported(`region "${region.name}": ${what}, and ${why}`, mine, theirs, hint);
  if (localHeads !== remoteHeads) {
    throw refused(
      "blocks must be split by head",
      `${localHeads} heads, TP ${local.tpSize}`,
      `${remoteHeads} heads, TP ${remote.tpSize}`,
      "use equal TP sizes on both sides",
    );
  }
  if (isCut) {
    throw refused(
      "kernel blocks of different sizes must be cut by token",
      `${local.kernelBlockSize} tokens`,
      `${remote.kernelBlockSize} tokens`,
      "use equal kernel block sizes on both sides",
    );
  }
  if (heads === undefined || orderOfLayout(local.layout) === orderOfLayout(remote.layout)) return;
  throw refused(
    "heads and tokens must be put in another order",
    local.layout,
    remote.layout,
    "use one layout on both sides",
  );
}

/** Blocks that are cut must have a known order, as a single head has in every layout. */
function checkOrder(
  { local, remote }: CompatibilityOptions,
  { region, localHeads, remoteHeads, isCut }: RegionCut,
): void {
  const isOpaque =
    orderOfBlock(local.layout, localHeads) === "opaque" ||
    orderOfBlock(remote.layout, remoteHeads) === "opaque";
  if (isOpaque && localHeads !== remoteHeads) {
    throw unsupported(
      `region "${region.name}": blocks must be split by head, and the layout does not keep heads together`,
      `${localHeads} heads, ${local.layout}`,
      `${remoteHeads} heads, ${remote.layout}`,
      "use a head-major layout (LBHNC) on both sides, or equal TP sizes",
    );
  }
  if (!isCut || (!isOpaque && hasPlainTokens(local, remote))) return;
  throw unsupported(
    `region "${region.name}": kernel blocks of different sizes need a known order of tokens`,
    `${local.kernelBlockSize} tokens, ${local.layout} on ${local.attentionBackend}`,
    `${remote.kernelBlockSize} tokens, ${remote.layout} on ${remote.attentionBackend}`,
    "use equal kernel block sizes",
  );
}
