import type { KvCacheKind } from "@kv/interface";
import { kvReplication, tpRatio } from "@kv/topology";
import type { ReceiveConversion } from "./engine-plan-types.js";
import type { ModelGeometry, RankGeometry } from "./geometry.js";
import { checkModelGeometry, checkRankGeometry } from "./geometry-checks.js";
import { incompatible, unsupported } from "./incompatible.js";
import { hasPlainTokens, orderOfLayout } from "./layout.js";

export interface CompatibilityOptions extends ModelGeometry {
  readonly local: RankGeometry;
  readonly remote: RankGeometry;
  /** Conversions that may be used after a receive (vLLM: `enable_permute_local_kv` for "hnd-to-nhd"). Default none. */
  readonly conversions?: readonly ReceiveConversion[];
  /** Groups with block tables of their own share memory; conversions then do not apply. Default: more than one group. */
  readonly hybridCache?: boolean;
  /** Default true. Looked at for state-space models. */
  readonly prefixCaching?: boolean;
}

/** What follows from two sides that go together. */
export interface PairFacts {
  /** Remote kernel blocks in a local one. */
  readonly blockSizeRatio: number;
  /** KV heads in a local block and in a remote one; 1 for MLA. */
  readonly localHeads: number;
  readonly remoteHeads: number;
  /** Conversions that this pair needs. */
  readonly conversions: readonly ReceiveConversion[];
}

/**
 * Accepts or refuses a pair, by the rules of vLLM 0.33's `_validate_remote_agent_handshake`. Errors, each with both values:
 * `KV_TOPOLOGY_INVALID`, `KV_PLAN_INVALID`, `KV_PLAN_INCOMPATIBLE`, `KV_PLAN_UNSUPPORTED`.
 */
export function checkCompatibility(options: CompatibilityOptions): PairFacts {
  const { local, remote, groups } = options;
  checkModelGeometry(options);
  checkRankGeometry("the local rank", local, options);
  checkRankGeometry(`remote rank ${remote.tpRank}`, remote, options);
  checkDcp(local, remote, groups);
  const ratio = tpRatio(local.tpSize, remote.tpSize);
  const blockSizeRatio = blockSizes(local, remote);
  const isMla = groups.includes("mla");
  const heads = (tpSize: number) =>
    kvReplication({ tpSize, remoteTpSize: 1, numKvHeads: options.numKvHeads, isMla }).localHeads;
  const facts = { blockSizeRatio, localHeads: heads(local.tpSize), remoteHeads: heads(remote.tpSize) };

  const conversions = isMla ? [] : layoutConversion(options);
  if (local.attentionBackend !== remote.attentionBackend) conversions.push(...backendConversion(options));
  if (
    !isMla &&
    facts.localHeads !== facts.remoteHeads &&
    orderOfLayout(local.layout) !== "head-major" &&
    !conversions.includes("hnd-to-nhd")
  ) {
    throw unsupported(
      `TP ratio ${ratio} splits blocks by head, which the layout does not keep together`,
      local.layout,
      remote.layout,
      "use a head-major layout (LBHNC) on both sides, or equal TP sizes",
    );
  }
  checkStateSpace(options);
  checkRegions(options, facts, isMla);
  return Object.freeze({ ...facts, conversions: Object.freeze(conversions) });
}

function checkDcp(local: RankGeometry, remote: RankGeometry, groups: readonly KvCacheKind[]): void {
  const [mine, theirs] = [local.dcpSize ?? 1, remote.dcpSize ?? 1];
  if (mine % theirs !== 0 && theirs % mine !== 0) {
    throw incompatible("DCP sizes must divide one another", mine, theirs);
  }
  if (mine !== theirs && groups.includes("mamba")) {
    throw unsupported("state-space caches need equal DCP sizes", mine, theirs);
  }
}

function blockSizes(local: RankGeometry, remote: RankGeometry): number {
  const [mine, theirs] = [local.kernelBlockSize, remote.kernelBlockSize];
  if (mine % theirs === 0) return mine / theirs;
  throw unsupported(
    "the local kernel block size must be a multiple of the remote one",
    mine,
    theirs,
    `give the local engine a block size that is a multiple of ${theirs}`,
  );
}

function layoutConversion(options: CompatibilityOptions): ReceiveConversion[] {
  const { local, remote, conversions = [] } = options;
  if (local.layout === remote.layout) return [];
  const possible = remote.layout === "LBHNC" && local.layout === "LBNHC";
  if (!possible || !conversions.includes("hnd-to-nhd")) {
    throw incompatible(
      "KV cache layouts differ",
      local.layout,
      remote.layout,
      possible
        ? 'set enable_permute_local_kv to true in kv_transfer_config (conversion "hnd-to-nhd"), or use one layout'
        : "use one layout on both sides",
    );
  }
  refuseHybrid(options, "hnd-to-nhd");
  return ["hnd-to-nhd"];
}

function backendConversion(options: CompatibilityOptions): ReceiveConversion[] {
  const { local, remote, conversions = [] } = options;
  if (!conversions.includes("attention-order")) {
    throw incompatible(
      "attention backends differ, and with them the order inside a head may",
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
    `conversion "${conversion}" does not go with KV cache groups that share memory`,
    `${options.local.layout} on ${options.local.attentionBackend}`,
    `${options.remote.layout} on ${options.remote.attentionBackend}`,
  );
}

function checkStateSpace({ local, remote, groups, prefixCaching = true }: CompatibilityOptions): void {
  const [mine, theirs] = [local.physicalBlocksPerLogical, remote.physicalBlocksPerLogical];
  if (!groups.includes("mamba") || mine === theirs || !prefixCaching) return;
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
  if (mine.length !== theirs.length)
    throw incompatible("numbers of regions differ", mine.length, theirs.length);
  const hybrid = options.groups.includes("mamba");
  for (const [index, region] of mine.entries()) {
    const other = theirs[index];
    if (other === undefined || region.name !== other.name) {
      throw incompatible(
        `region ${index} must name the same cache on both sides`,
        region.name,
        other?.name ?? null,
      );
    }
    // The page of a hybrid is sized by its state, not by heads and tokens; only the MLA part of one is comparable.
    if (hybrid && !isMla) continue;
    const { localHeads, remoteHeads, blockSizeRatio } = facts;
    if (region.blockLengthBytes * remoteHeads === other.blockLengthBytes * localHeads * blockSizeRatio)
      continue;
    throw incompatible(
      `region ${index} "${region.name}": block lengths do not fit ${localHeads} local and ${remoteHeads} remote heads ` +
        `at ${blockSizeRatio} remote blocks in a local one`,
      region.blockLengthBytes,
      other.blockLengthBytes,
    );
  }
}
