import type { TpMapping } from "@kv/topology";
import { unsupported } from "../errors.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";

/**
 * A mapping for DCP groups that are smaller than the engine, so that several ranks hold a replica
 * of the same slice of a sequence. Each reader reads one replica of a slice, readers choose
 * different replicas, and every reader notifies all of them. So a remote rank awaits a notification
 * from each reader of its slice. (vLLM 0.33 has DCP groups of 1 or of all ranks only; its
 * `dcp_source_ranks` would read every replica.)
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
  // The readers of a remote slice: the ranks of one local slice, or those of the several local
  // slices that it is cut into.
  const readers = local.tpSize / Math.min(mine, theirs);
  const reader = Math.floor(local.tpRank / Math.min(mine, theirs));
  const attentionRanks = Object.freeze(
    mapping.handshakeRanks.filter((rank) => Math.floor(rank / theirs) === reader % replicas),
  );
  const allSourceRanks = attentionRanks;
  return Object.freeze({
    ...mapping,
    sourceRanksPerGroup: Object.freeze(mapping.sourceRanksPerGroup.map(() => attentionRanks)),
    attentionRanks,
    allSourceRanks,
    rankToAttentionSlot: Object.freeze(Object.fromEntries(attentionRanks.map((rank) => [rank, 0]))),
    localConsumers: readers,
    notifyOnlyRanks: Object.freeze(
      mapping.handshakeRanks.filter((rank) => !attentionRanks.includes(rank)),
    ),
  });
}
