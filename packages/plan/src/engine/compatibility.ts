import type { KvCacheKind } from "@kv/interface";
import { kvReplication, tpRatio } from "@kv/topology";
import { incompatible, unsupported } from "../errors.js";
import { checkModelGeometry, checkRankGeometry } from "../geometry/geometry-checks.js";
import { hasPlainTokens, orderOfLayout } from "../geometry/layout.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { cacheKind } from "../kinds/registry.js";
import type { BlockParts } from "./attention-pieces.js";
import {
  groupsOfRegion,
  headsInBlock,
  headsInRegion,
  headsOfGroup,
  mappingsByHeads,
  whyWhole,
} from "./region-heads.js";

/**
 * A conversion that only the engine can do, after a receive. `attention-order`: the attention
 * backends have different names, so the order inside a head may differ. `hnd-to-nhd`: the remote
 * cache is head-major and the local one token-major (vLLM: `enable_permute_local_kv`).
 */
export type ReceiveConversion = "attention-order" | "hnd-to-nhd";

/** Input of `checkCompatibility`. */
export interface CompatibilityOptions extends ModelGeometry {
  /** The local rank. */
  readonly local: RankGeometry;
  /** A remote rank. */
  readonly remote: RankGeometry;
  /**
   * Conversions that the local engine can do after a receive (vLLM: `enable_permute_local_kv` for
   * "hnd-to-nhd"). @default none
   */
  readonly conversions?: readonly ReceiveConversion[] | undefined;
  /**
   * Groups with block tables of their own share memory; conversions then do not apply. @default
   * true for more than one group
   */
  readonly hybridCache?: boolean | undefined;
  /** The local engine caches prefixes. Matters for state-space models only. @default true */
  readonly prefixCaching?: boolean | undefined;
}

/** The facts that follow from a compatible pair of ranks. */
export interface PairFacts {
  /**
   * `localParts`. Where remote kernel blocks are parts of the local ones: remote blocks in a local
   * block.
   */
  readonly blockSizeRatio: number;
  /** Parts of a local kernel block; a local and a remote part hold equally many tokens. */
  readonly localParts: number;
  /** Parts of a remote kernel block. */
  readonly remoteParts: number;
  /** KV heads in a local block; 1 for MLA. */
  readonly localHeads: number;
  /** KV heads in a remote block; 1 for MLA. */
  readonly remoteHeads: number;
  /** Conversions that the pair needs. */
  readonly conversions: readonly ReceiveConversion[];
}

/**
 * Accepts or refuses a pair of ranks by the rules of vLLM 0.33's
 * `_validate_remote_agent_handshake`. Unlike vLLM it refuses to cut blocks of unknown order, and
 * accepts pairs whose bytes a plan can put in order. `buildEngineTransferPlan` calls it for each
 * remote rank. Errors, each with both values: `KV_TOPOLOGY_INVALID`, `KV_PLAN_INVALID`,
 * `KV_PLAN_INCOMPATIBLE`, `KV_PLAN_UNSUPPORTED`.
 */
export function checkCompatibility(options: CompatibilityOptions): PairFacts {
  const { local, remote, groups } = options;
  checkModelGeometry(options);
  checkRankGeometry("the local rank", local, options);
  checkRankGeometry(`remote rank ${remote.tpRank}`, remote, options);
  checkDcp(local, remote, groups);
  tpRatio(local.tpSize, remote.tpSize);
  const parts = partsOf(local, remote);
  const isMla = isMlaModel(groups);
  if (parts.remoteParts > 1 && !isMla) checkWholeHeads(options);
  const heads = (tpSize: number) =>
    kvReplication({ tpSize, remoteTpSize: 1, numKvHeads: options.numKvHeads, isMla }).localHeads;
  const facts = {
    blockSizeRatio: parts.localParts,
    ...parts,
    localHeads: heads(local.tpSize),
    remoteHeads: heads(remote.tpSize),
  };
  const conversions = isMla ? [] : layoutConversion(options);
  if (local.attentionBackend !== remote.attentionBackend)
    conversions.push(...backendConversion(options));
  checkStateSpace(options);
  checkRegions(options, facts, isMla);
  return Object.freeze({ ...facts, conversions: Object.freeze(conversions) });
}

/** Whether the target model's attention is MLA; a draft model's attention may differ. */
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
  if (mine % theirs !== 0 && theirs % mine !== 0) {
    throw incompatible("DCP sizes must divide one another", mine, theirs);
  }
  if (mine !== theirs && hasState(groups)) {
    throw unsupported("state-space caches need equal DCP sizes", mine, theirs);
  }
  const logical = (rank: RankGeometry) => rank.kernelBlockSize * rank.physicalBlocksPerLogical;
  if ((mine === 1 && theirs === 1) || logical(local) === logical(remote)) return;
  throw unsupported(
    "blocks that DCP ranks share must hold equally many tokens on both sides",
    logical(local),
    logical(remote),
  );
}

/**
 * The fewest parts of equally many tokens: their size is the greatest common divisor of both block
 * sizes.
 */
function partsOf(local: RankGeometry, remote: RankGeometry): BlockParts {
  let [unit, rest] = [local.kernelBlockSize, remote.kernelBlockSize];
  while (rest > 0) [unit, rest] = [rest, unit % rest];
  return { localParts: local.kernelBlockSize / unit, remoteParts: remote.kernelBlockSize / unit };
}

/**
 * Where remote blocks are cut (vLLM does not) they are cut by head, so each rank must have whole
 * heads.
 */
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

function layoutConversion(options: CompatibilityOptions): ReceiveConversion[] {
  const { local, remote, conversions = [] } = options;
  if (local.layout === remote.layout) return [];
  const turned = remote.layout === "LBHNC" && local.layout === "LBNHC";
  const hybrid = options.hybridCache ?? options.groups.length > 1;
  if (turned && conversions.includes("hnd-to-nhd") && !hybrid) return ["hnd-to-nhd"];
  const orders = [orderOfLayout(local.layout), orderOfLayout(remote.layout)];
  if (!orders.includes("opaque") && (orders[0] === orders[1] || hasPlainOrder(local, remote)))
    return [];
  throw incompatible(
    "the KV cache layouts differ, and descriptors cannot put the bytes in order: " +
      (orders.includes("opaque")
        ? "one layout spreads the heads of a block over memory"
        : "the attention backend has an order of tokens of its own"),
    local.layout,
    remote.layout,
    "use one layout on both sides",
  );
}

function hasPlainOrder(local: RankGeometry, remote: RankGeometry): boolean {
  return hasPlainTokens(local.attentionBackend) && hasPlainTokens(remote.attentionBackend);
}

function backendConversion(options: CompatibilityOptions): ReceiveConversion[] {
  const { local, remote, conversions = [] } = options;
  if (!conversions.includes("attention-order")) {
    throw incompatible(
      "the attention backends differ, so the order inside a head may differ",
      local.attentionBackend,
      remote.attentionBackend,
      'use one backend on both sides, or an engine that declares the conversion "attention-order"',
    );
  }
  if (!hasPlainTokens(local.attentionBackend)) refuseHybrid(options, "attention-order");
  return ["attention-order"];
}

function refuseHybrid(options: CompatibilityOptions, conversion: ReceiveConversion): void {
  if (!(options.hybridCache ?? options.groups.length > 1)) return;
  throw unsupported(
    `conversion "${conversion}" does not support KV cache groups that share memory`,
    `${options.local.layout} on ${options.local.attentionBackend}`,
    `${options.remote.layout} on ${options.remote.attentionBackend}`,
  );
}

function checkStateSpace({
  local,
  remote,
  groups,
  prefixCaching = true,
}: CompatibilityOptions): void {
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
  facts: Omit<PairFacts, "conversions">,
  isMla: boolean,
): void {
  const [mine, theirs] = [options.local.regions, options.remote.regions];
  if (mine.length !== theirs.length) {
    throw incompatible(
      `numbers of regions differ${onlyOn("the local rank", mine, theirs)}${onlyOn("the remote rank", theirs, mine)}`,
      mine.length,
      theirs.length,
      "a draft model on one side only is the usual cause: give both engines the same --speculative-config",
    );
  }
  const hybrid = hasState(options.groups);
  for (const [index, region] of mine.entries()) {
    const other = theirs[index];
    if (other === undefined || region.name !== other.name) {
      throw incompatible(
        `region ${index} must name the same cache on both sides`,
        region.name,
        other?.name ?? null,
      );
    }
    const heads = headsInRegion(options.local, region, options);
    const [localHeads, remoteHeads] = [
      headsInBlock(options.local, heads),
      headsInBlock(options.remote, heads),
    ];
    requireSameShares(options, region, heads);
    const { localParts, remoteParts } = facts;
    const isCut = localParts > 1 || remoteParts > 1;
    checkWhole(options, { region, heads, localHeads, remoteHeads, isCut });
    const isState = (group: number) => cacheKind(options.groups[group] ?? "").sharding === "state";
    if (!groupsOfRegion(options.local, region, options).every(isState))
      checkOrder(region.name, options, { localHeads, remoteHeads, isCut });
    // The state decides the size of a hybrid's page, not heads and tokens; only with MLA are pages
    // comparable.
    if (hybrid && !isMla) continue;
    if (
      region.blockLengthBytes * remoteHeads * remoteParts ===
      other.blockLengthBytes * localHeads * localParts
    )
      continue;
    throw incompatible(
      `region ${index} "${region.name}": block lengths do not fit ${localHeads} local and ${remoteHeads} remote heads ` +
        `at ${localParts} and ${remoteParts} equal parts of a block`,
      region.blockLengthBytes,
      other.blockLengthBytes,
    );
  }
}

const MAX_NAMES = 8;

/** The regions that only one side names, as a clause; empty where there are none. */
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

/**
 * Groups that share a region use the same descriptors, so each source must hold the same share of
 * every group's block.
 */
function requireSameShares(
  model: CompatibilityOptions,
  region: RegionGeometry,
  heads: number | undefined,
): void {
  const { local, remote, groups } = model;
  const unlike = groupsOfRegion(local, region, model)
    .filter((group) => cacheKind(groups[group] ?? "").sharding !== "state")
    .filter((group) => headsOfGroup(region, group, model) !== heads);
  if (unlike.length === 0) return;
  const mapping = mappingsByHeads(local, remote, model);
  const [shares, ranks] = [
    headsInBlock(local, heads) / headsInBlock(remote, heads),
    mapping(heads),
  ];
  const inBlock = (rank: RankGeometry, group: number, own: number | undefined) =>
    `${headsInBlock(rank, own)} heads of group ${group} in a block, ${headsInBlock(rank, heads)} of another`;
  for (const group of unlike) {
    const own = headsOfGroup(region, group, model);
    const dealt = mapping(own);
    const same =
      headsInBlock(local, own) / headsInBlock(remote, own) === shares &&
      dealt.rankOffsetFactor === ranks.rankOffsetFactor &&
      dealt.attentionRanks.join() === ranks.attentionRanks.join();
    if (same) continue;
    throw unsupported(
      `region "${region.name}" is shared by groups whose KV heads are split over the ranks differently`,
      inBlock(local, group, own),
      inBlock(remote, group, own),
      "use equal TP sizes, or sizes that divide the heads of each group",
    );
  }
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
 * Blocks whose bytes are not heads × tokens × cells are only moved whole, into blocks of the same
 * order (vLLM 0.33 refuses NVFP4 alone, and by head alone).
 */
function checkWhole(model: CompatibilityOptions, cut: RegionCut): void {
  const { local, remote } = model;
  const { region, heads, localHeads, remoteHeads, isCut } = cut;
  const why = whyWhole(local, remote, region, model);
  if (why === undefined) return;
  const refused = (what: string, mine: string, theirs: string, hint: string) =>
    unsupported(`region "${region.name}": ${what}, and ${why}`, mine, theirs, hint);
  const sizes = (rank: RankGeometry, own: number) => `${own} heads, TP ${rank.tpSize}`;
  if (localHeads !== remoteHeads) {
    throw refused(
      "blocks must be split by head",
      sizes(local, localHeads),
      sizes(remote, remoteHeads),
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

/**
 * Blocks that are cut by head or token must have a known order. A single head has one in every
 * layout.
 */
function checkOrder(
  name: string,
  { local, remote }: CompatibilityOptions,
  {
    localHeads,
    remoteHeads,
    isCut,
  }: { readonly localHeads: number; readonly remoteHeads: number; readonly isCut: boolean },
): void {
  const isOpaque = (rank: RankGeometry, heads: number) =>
    heads > 1 && orderOfLayout(rank.layout) === "opaque";
  const opaque = isOpaque(local, localHeads) || isOpaque(remote, remoteHeads);
  if (opaque && localHeads !== remoteHeads) {
    throw unsupported(
      `region "${name}": blocks must be split by head, and the layout does not keep heads together`,
      `${localHeads} heads, ${local.layout}`,
      `${remoteHeads} heads, ${remote.layout}`,
      "use a head-major layout (LBHNC) on both sides, or equal TP sizes",
    );
  }
  if (!isCut || (!opaque && hasPlainOrder(local, remote))) return;
  throw unsupported(
    `region "${name}": kernel blocks of different sizes need a known order of tokens`,
    `${local.kernelBlockSize} tokens, ${local.layout} on ${local.attentionBackend}`,
    `${remote.kernelBlockSize} tokens, ${remote.layout} on ${remote.attentionBackend}`,
    "use equal kernel block sizes",
  );
}
