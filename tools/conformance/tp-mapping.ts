import type {
  computeTpMapping,
  dcpConsumerCount,
  handshakeTargetRanks,
  kvReplication,
  targetRemoteRanks,
  tpRatio,
} from "@kv/topology";
import { fields } from "./fields.js";
import type { Replay } from "./outcome.js";

export interface TopologyFunctions {
  readonly computeTpMapping: typeof computeTpMapping;
  readonly dcpConsumerCount: typeof dcpConsumerCount;
  readonly handshakeTargetRanks: typeof handshakeTargetRanks;
  readonly kvReplication: typeof kvReplication;
  readonly targetRemoteRanks: typeof targetRemoteRanks;
  readonly tpRatio: typeof tpRatio;
}

/** vLLM's `compute_tp_mapping` and the results of its `TransferTopology`. */
export function replayTpMapping(topology: TopologyFunctions): Replay {
  return (input) => {
    const read = fields(input);
    const pair = {
      tpRank: read.number("tp_rank"),
      tpSize: read.number("tp_size"),
      remoteTpSize: read.number("remote_tp_size"),
      dcpSize: read.numberOr("dcp_size", 1),
      remoteDcpSize: read.numberOr("remote_dcp_size", 1),
    };
    const cache = { numKvHeads: read.number("kv_heads"), isMla: read.boolean("is_mla") };
    const headShardedKvHeads = read.optionalNumber("head_sharded_kv_heads");
    const replication = topology.kvReplication({ ...pair, ...cache });
    const mapping = topology.computeTpMapping({
      ...pair,
      ...cache,
      groups: read.kinds("groups"),
      ...(headShardedKvHeads === undefined ? {} : { headShardedKvHeads }),
    });
    return {
      tp_ratio: topology.tpRatio(pair.tpSize, pair.remoteTpSize),
      handshake_target_ranks: topology.handshakeTargetRanks(pair),
      target_remote_ranks: topology.targetRemoteRanks(pair),
      is_kv_replicated: replication.remoteReplicatesHeads,
      replicates_kv_cache: replication.remoteReplicatesCache,
      local_replicates_kv_cache: replication.localReplicatesCache,
      local_physical_heads: replication.localHeads,
      dcp_rank: pair.tpRank % pair.dcpSize,
      dcp_consumer_count: topology.dcpConsumerCount(pair),
      mapping: mappingAsJson(mapping),
    };
  };
}

/** A mapping with vLLM's names. */
export function mappingAsJson(mapping: ReturnType<typeof computeTpMapping>): unknown {
  return {
    source_ranks_per_group: mapping.sourceRanksPerGroup,
    all_source_ranks: mapping.allSourceRanks,
    rank_to_attention_slot: mapping.rankToAttentionSlot,
    rank_offset_factor: mapping.rankOffsetFactor,
    local_consumers: mapping.localConsumers,
  };
}
