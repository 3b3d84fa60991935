import type { TpMapping } from "@kv/topology";
import { unsupported } from "../errors.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";

/**
 * DCP groups smaller than an engine: several ranks hold the same slice of a sequence. One of each is read, another one by each reader, and
 * all are told; so each waits for as many notifications as there are readers of its slice. (vLLM 0.33 has groups of 1 or of all ranks only;
 * its `dcp_source_ranks` would read every copy.) Errors: `KV_PLAN_UNSUPPORTED` where a copy would be told by nobody.
 */
export function readOneReplica(mapping: TpMapping, local: RankGeometry, remote: RankGeometry): TpMapping {
  const [mine, theirs] = [local.dcpSize ?? 1, remote.dcpSize ?? 1];
  if (theirs === 1) return mapping;
  const copies = Math.floor(remote.tpSize / theirs);
  if (mine > theirs && copies > 1) {
    throw unsupported(
      "a DCP group that is larger than the remote's, which does not span its engine: nobody would tell the copies of a slice",
      `DCP ${mine} of TP ${local.tpSize}`,
      `DCP ${theirs} of TP ${remote.tpSize}`,
      "use DCP groups as large as the engines, or the same DCP size on both sides",
    );
  }
  // A slice of the remote's is needed by the ranks of one local slice, or by those of the several slices that it is cut into.
  const readers = local.tpSize / Math.min(mine, theirs);
  const reader = Math.floor(local.tpRank / Math.min(mine, theirs));
  const attentionRanks = Object.freeze(
    mapping.handshakeRanks.filter((rank) => Math.floor(rank / theirs) === reader % copies),
  );
  const allSourceRanks = attentionRanks;
  return Object.freeze({
    ...mapping,
    sourceRanksPerGroup: Object.freeze(mapping.sourceRanksPerGroup.map(() => attentionRanks)),
    attentionRanks,
    allSourceRanks,
    rankToAttentionSlot: Object.freeze(Object.fromEntries(attentionRanks.map((rank) => [rank, 0]))),
    localConsumers: readers,
    notifyOnlyRanks: Object.freeze(mapping.handshakeRanks.filter((rank) => !attentionRanks.includes(rank))),
  });
}
