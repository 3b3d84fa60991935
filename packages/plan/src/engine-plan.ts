import { type DescriptorTable, type KvCacheKind, KvError } from "@kv/interface";
import { computeTpMapping, kvHeadsOfRank, type TpMapping } from "@kv/topology";
import { SHARED_REGION } from "./descriptor-ids.js";
import {
  ranksByNumber,
  refuseDcp,
  refuseKinds,
  requireSameEngine,
  requireSameRegions,
} from "./engine-checks.js";
import type {
  BlockOrder,
  EngineTransferPlan,
  ReceiveConversion,
  SourcePlan,
  TransferForm,
} from "./engine-plan-types.js";
import type { ModelGeometry, RankGeometry } from "./geometry.js";
import { unsupported } from "./incompatible.js";
import { hasPlainTokens, orderOfLayout } from "./layout.js";
import { checkCompatibility, type PairFacts } from "./pair-checks.js";
import { descriptorTable, indexRegions } from "./region-rows.js";

export interface BuildPlanOptions extends ModelGeometry {
  readonly local: RankGeometry;
  /** The ranks of `handshakeTargetRanks`, in any order; each checked against the local rank and against one another. */
  readonly remotes: readonly RankGeometry[];
  /** Conversions that may be used after a receive; a pair that needs another is refused. Default none. */
  readonly conversions?: readonly ReceiveConversion[];
  /** The local engine never looks at tokens beyond a request's last: then nothing is zeroed after a receive. Default false. */
  readonly masksUncovered?: boolean;
}

/**
 * The plan of one local rank against one remote engine. Errors, each with both values: `KV_TOPOLOGY_INVALID` (sizes, ranks),
 * `KV_PLAN_INVALID` (a side contradicts itself), `KV_PLAN_INCOMPATIBLE` (the sides disagree), `KV_PLAN_UNSUPPORTED`.
 */
export function buildEngineTransferPlan(options: BuildPlanOptions): EngineTransferPlan {
  const { local, groups, numKvHeads } = options;
  const remote = options.remotes[0];
  if (remote === undefined)
    throw new KvError("KV_PLAN_INVALID", "a plan needs the geometry of at least one remote rank, got none");
  const isMla = groups.includes("mla");
  refuseKinds(groups);
  const facts = options.remotes.map((rank) => {
    requireSameEngine(remote, rank);
    return checkCompatibility({ ...options, remote: rank });
  })[0] as PairFacts;
  if (!isMla) for (const rank of [local, remote]) kvHeadsOfRank(rank.tpRank, rank.tpSize, numKvHeads);
  refuseDcp(local, remote);
  requireSameRegions(local, remote);

  const mapping = computeTpMapping({
    tpRank: local.tpRank,
    tpSize: local.tpSize,
    remoteTpSize: remote.tpSize,
    numKvHeads,
    isMla,
    groups,
  });
  const ranks = ranksByNumber(options.remotes, mapping);
  const { blockSizeRatio } = facts;
  const order = receiveOrder(local, remote, facts);
  requireWholeShares(local, facts, order === "opaque" ? 1 : local.kernelBlockSize, mapping);
  if (order === "opaque" && blockSizeRatio > 1) {
    throw unsupported(
      `tokens of different kernel block sizes (${local.kernelBlockSize}, ${remote.kernelBlockSize}) must be in an order that is known`,
      `${local.layout} on ${local.attentionBackend}`,
      `${remote.layout} on ${remote.attentionBackend}`,
      "use equal kernel block sizes",
    );
  }
  return Object.freeze({
    mapping,
    form: transferForm(facts, order),
    blockSizeRatio,
    groups: Object.freeze([...groups]),
    local,
    remote,
    sources: Object.freeze(
      mapping.allSourceRanks.map((rank) =>
        sourcePlan(local, ranks.get(rank) ?? remote, mapping, facts, groups),
      ),
    ),
    localConsumers: mapping.localConsumers,
    notifyOnlyRanks: mapping.notifyOnlyRanks,
    conversions: facts.conversions,
    localHeads: facts.localHeads,
    blockOrder: order,
    uncovered: order === "opaque" || options.masksUncovered === true ? "masked" : "zeroed",
    localIndexing: indexRegions(local.regions, blockSizeRatio),
    remoteIndexing: indexRegions(remote.regions, 1),
    regionsOfGroup: regionsOfGroup(local, groups),
  });
}

/** Blocks must divide into heads (and tokens, where their order matters), and the heads of all sources must fill the local ones. */
function requireWholeShares(local: RankGeometry, facts: PairFacts, tokens: number, mapping: TpMapping): void {
  const { localHeads, remoteHeads } = facts;
  const filled = mapping.allSourceRanks.length * Math.min(localHeads, remoteHeads);
  if (filled !== localHeads) {
    throw new KvError(
      "KV_INTERNAL",
      `${mapping.allSourceRanks.length} sources with ${remoteHeads} heads each fill ${filled} of ${localHeads} local heads`,
    );
  }
  for (const region of local.regions) {
    if (region.blockLengthBytes % (localHeads * tokens) === 0) continue;
    throw new KvError(
      "KV_PLAN_INVALID",
      `region "${region.name}": a local block of ${region.blockLengthBytes} bytes does not divide into ${localHeads} heads of ` +
        `${tokens} tokens`,
      { details: { region: region.name, blockLengthBytes: region.blockLengthBytes, localHeads, tokens } },
    );
  }
}

function receiveOrder(local: RankGeometry, remote: RankGeometry, facts: PairFacts): BlockOrder {
  if (!hasPlainTokens(local.attentionBackend) || !hasPlainTokens(remote.attentionBackend)) return "opaque";
  // One head leaves only tokens to be ordered, whatever the layout calls it.
  const order = orderOfLayout(local.layout);
  return facts.localHeads === 1 && order === "head-major" ? "token-major" : order;
}

function transferForm(
  { blockSizeRatio, conversions, localHeads }: PairFacts,
  order: BlockOrder,
): TransferForm {
  if (conversions.includes("hnd-to-nhd") && localHeads > 1) return "permute";
  return blockSizeRatio > 1 && order === "head-major" ? "permute" : "copy";
}

function sourcePlan(
  local: RankGeometry,
  remote: RankGeometry,
  mapping: TpMapping,
  facts: PairFacts,
  groups: readonly KvCacheKind[],
): SourcePlan {
  const { blockSizeRatio } = facts;
  const sources = mapping.allSourceRanks.length;
  const slot = mapping.rankToAttentionSlot[remote.tpRank] ?? 0;
  // What a source fills of each part of a local block: an equal share per source.
  const shareBytes = (region: number) =>
    (local.regions[region]?.blockLengthBytes ?? 0) / blockSizeRatio / sources;
  let localTable: DescriptorTable | undefined;
  let remoteTable: DescriptorTable | undefined;
  return Object.freeze({
    remoteRank: remote.tpRank,
    groups: Object.freeze([...groups.keys()]),
    localListKey: `parts=${blockSizeRatio} share=${slot}/${sources}`,
    get localTable() {
      localTable ??= descriptorTable(
        local,
        local.regions.map((region, index) => ({
          region,
          parts: blockSizeRatio,
          offsetBytes: slot * shareBytes(index),
          lengthBytes: shareBytes(index),
        })),
      );
      return localTable;
    },
    get remoteTable() {
      remoteTable ??= descriptorTable(
        remote,
        remote.regions.map((region, index) => ({
          region,
          parts: 1,
          offsetBytes: mapping.rankOffsetFactor * shareBytes(index),
          lengthBytes: shareBytes(index),
        })),
      );
      return remoteTable;
    },
  });
}

/** Where all regions name one group, every group's blocks are in every region; else each in its own and in the shared ones. */
function regionsOfGroup(local: RankGeometry, groups: readonly KvCacheKind[]): readonly (readonly number[])[] {
  const ids = local.regions.map((region) => region.groupId);
  const mapped = new Set(ids).size > 1;
  return Object.freeze(
    groups.map((_, group) => {
      const regions = [...ids.keys()].filter((region) => {
        return !mapped || ids[region] === group || ids[region] === SHARED_REGION;
      });
      return Object.freeze(regions);
    }),
  );
}
