import { computeTpMapping, type TpMapping } from "@kv/topology";
import { unsupported } from "../errors.js";
import type { ModelGeometry, RankGeometry } from "../geometry/rank-geometry.js";
import { cacheKind } from "../kinds/registry.js";

/**
 * Returns mappings by number of KV heads, which is undefined where every rank holds the same bytes.
 * Each is computed once.
 *
 * @throws `KV_TOPOLOGY_INVALID`, `KV_PLAN_UNSUPPORTED`.
 */
export function mappingsByHeads(
  local: RankGeometry,
  remote: RankGeometry,
  model: ModelGeometry,
): (heads: number | undefined) => TpMapping {
  const { tpRank, tpSize, dcpSize = 1 } = local;
  const groups = model.groups.map((kind) =>
    cacheKind(kind).sharding === "state" ? "mamba" : "full",
  );
  const made = new Map<number | undefined, TpMapping>();
  return (heads) => {
    const known = made.get(heads);
    if (known !== undefined) return known;
    const mapping = computeTpMapping({
      tpRank,
      tpSize,
      remoteTpSize: remote.tpSize,
      dcpSize,
      remoteDcpSize: remote.dcpSize ?? 1,
      numKvHeads: heads ?? 1,
      isMla: heads === undefined,
      groups,
    });
    const read = heads === undefined ? readOneReplica(mapping, local, remote) : mapping;
    made.set(heads, read);
    return read;
  };
}

/**
 * In DCP groups smaller than the engine, several ranks hold a replica of a slice. Each reader reads
 * one of them, readers read different ones, and all notify all, so a remote rank awaits every
 * reader of its slice. (vLLM 0.33 has DCP groups of 1 or of all ranks only; its `dcp_source_ranks`
 * would read every replica.)
 *
 * @throws `KV_PLAN_UNSUPPORTED` where no reader would notify a replica.
 */
export function readOneReplica(
  mapping: TpMapping,
  local: RankGeometry,
  remote: RankGeometry,
): TpMapping {
  const [mine, theirs] = [local.dcpSize ?? 1, remote.dcpSize ?? 1];
  if (theirs === 1) return mapping;
  const replicas = Math.floor(remote.tpSize / theirs);
  if (mine > theirs && replicas > 1) {
    throw unsupported(
      "a DCP group that is larger than the remote's, which does not span its engine: no reader would notify the replicas of a slice",
      `DCP ${mine} of TP ${local.tpSize}`,
      `DCP ${theirs} of TP ${remote.tpSize}`,
      "use DCP groups as large as the engines, or the same DCP size on both sides",
    );
  }
  // Readers of a remote slice: ranks of one local slice, or of those that it is cut into.
  const slices = Math.min(mine, theirs);
  const reader = Math.floor(local.tpRank / slices);
  const isRead = (rank: number) => Math.floor(rank / theirs) === reader % replicas;
  const ranks = Object.freeze(mapping.handshakeRanks.filter(isRead));
  return Object.freeze({
    ...mapping,
    sourceRanksPerGroup: Object.freeze(mapping.sourceRanksPerGroup.map(() => ranks)),
    attentionRanks: ranks,
    allSourceRanks: ranks,
    rankToAttentionSlot: Object.freeze(Object.fromEntries(ranks.map((rank) => [rank, 0]))),
    localConsumers: local.tpSize / slices,
    notifyOnlyRanks: Object.freeze(mapping.handshakeRanks.filter((rank) => !isRead(rank))),
  });
}
