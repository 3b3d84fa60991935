import { KV_CACHE_LAYOUTS, type KvCacheLayout } from "@kv/interface";
import { checkCompatibility, type RankGeometry } from "@kv/plan";
import {
  computeTpMapping,
  dcpConsumerCount,
  handshakeTargetRanks,
  kvReplication,
  targetRemoteRanks,
  tpRatio,
} from "@kv/topology";
import { applyDcpPrefixCaching } from "../../packages/plan/src/request/dcp-blocks.js";
import { replayDescriptors } from "./descriptors.js";
import { fields } from "./fields.js";
import { Difference, type Replay } from "./outcome.js";
import {
  applyPrefixCaching,
  logicalToKernelBlockIds,
  mapBlockIdsForBlockSizeRatio,
} from "./vllm-block-ids.js";
import { computeDescriptorIds } from "./vllm-descriptor-ids.js";

/** vLLM's transformations of block ids; `in.fn` names the function. */
export const replayBlockIds: Replay = (input) => {
  const read = fields(input);
  const fn = read.string("fn");
  if (fn === "logical_to_kernel_block_ids") {
    return logicalToKernelBlockIds(read.kinds("groups"), read.blockIds("block_ids"), read.number("ratio"));
  }
  if (fn === "map_block_ids_for_block_size_ratio") {
    const [local, remote] = [read.blockIds("local_block_ids"), read.blockIds("remote_block_ids")];
    const mapped = mapBlockIdsForBlockSizeRatio(read.kinds("groups"), local, remote, read.number("ratio"));
    return [mapped.localBlockIds, mapped.remoteBlockIds];
  }
  if (fn === "apply_prefix_caching") {
    const trimmed = applyPrefixCaching({
      groups: read.kinds("groups"),
      decodeBlockIds: read.blockIds("decode_block_ids"),
      prefillBlockIds: read.blockIds("prefill_block_ids"),
      decodePhysicalPerLogical: read.number("decode_ppl"),
      prefillPhysicalPerLogical: read.number("prefill_ppl"),
    });
    return [trimmed.decodeBlockIds, trimmed.prefillBlockIds];
  }
  if (fn === "apply_dcp_prefix_caching") {
    const numRemoteBlocks = read.optionalNumber("num_remote_blocks");
    const matched = applyDcpPrefixCaching({
      localIds: read.numbers("local_ids"),
      remoteIds: read.numbers("remote_ids"),
      remoteRank: read.number("remote_rank"),
      localDcpSize: read.number("local_dcp_size"),
      localDcpRank: read.number("local_dcp_rank"),
      remoteDcpSize: read.number("remote_dcp_size"),
      localNumComputedBlocks: read.number("local_num_computed_blocks"),
      ...(numRemoteBlocks === undefined ? {} : { numRemoteBlocks }),
    });
    return [matched.localIds, matched.remoteIds];
  }
  throw new Difference(`in.fn names "${fn}", which is not known here`);
};

/** vLLM's `_compute_desc_ids`. */
export const replayDescriptorIds: Replay = (input) => {
  const read = fields(input);
  const convProjections = read.optionalNumbers("conv_dims")?.length;
  const regions = read.optionalNumbers("ssm_region_indices");
  const mapping = "uses_region_group_mapping";
  return computeDescriptorIds({
    groups: read.kinds("groups"),
    blockIds: read.blockIds("block_ids"),
    numRegions: read.number("num_regions"),
    numBlocks: read.number("dst_num_blocks"),
    physicalBlocksPerLogical: read.number("physical_blocks_per_logical"),
    regionGroupIds: read.optionalNumbers("region_group_ids") ?? read.numbers("self_region_group_ids"),
    regionNumBlocks: read.optionalNumbers("region_num_blocks"),
    usesRegionGroupMapping: read.present(mapping) ? read.boolean(mapping) : undefined,
    blockSizeRatio: read.optionalNumber("block_size_ratio"),
    scratchRegions: read.optionalNumbers("scratch_region_indices"),
    transferLayerGroupIds: read.optionalNumbers("transfer_layer_group_ids"),
    stateSpace: convProjections === undefined ? undefined : { convProjections, regions },
  });
};

/** vLLM's `compute_tp_mapping` and the results of its `TransferTopology`. */
export const replayTpMapping: Replay = (input) => {
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
  const replication = kvReplication({ ...pair, ...cache });
  const mapping = computeTpMapping({
    ...pair,
    ...cache,
    groups: read.kinds("groups"),
    ...(headShardedKvHeads === undefined ? {} : { headShardedKvHeads }),
  });
  return {
    tp_ratio: tpRatio(pair.tpSize, pair.remoteTpSize),
    handshake_target_ranks: handshakeTargetRanks(pair),
    target_remote_ranks: targetRemoteRanks(pair),
    is_kv_replicated: replication.remoteReplicatesHeads,
    replicates_kv_cache: replication.remoteReplicatesCache,
    local_replicates_kv_cache: replication.localReplicatesCache,
    local_physical_heads: replication.localHeads,
    dcp_rank: pair.tpRank % pair.dcpSize,
    dcp_consumer_count: dcpConsumerCount(pair),
    mapping: mappingAsJson(mapping),
  };
};

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

/** vLLM's `_validate_remote_agent_handshake`. The vectors give every region of a side the same geometry, at address 0. */
export const replayValidate: Replay = (input) => {
  const read = fields(input);
  const side = (
    prefix: "" | "remote_",
    tpRank: number,
    names: readonly string[],
    stride: number,
  ): RankGeometry => ({
    tpRank,
    tpSize: read.number(`${prefix}tp_size`),
    dcpSize: read.number(`${prefix}dcp_size`),
    kernelBlockSize: read.number(`${prefix}block_size`),
    physicalBlocksPerLogical: read.number(`${prefix}ppl`),
    layout: layout(read.string(`${prefix}layout`)),
    attentionBackend: read.string(`${prefix}backend`),
    deviceId: 0,
    regions: names.map((name) => ({
      name,
      baseAddress: 0,
      numBlocks: 8,
      blockLengthBytes: read.number(`${prefix}block_len`),
      blockStrideBytes: stride,
      groupId: 0,
      memoryType: "DRAM",
    })),
  });
  const isMla = read.boolean("is_mla");
  const kind = isMla ? "mla" : "full";
  const permute = read.boolean("enable_permute_local_kv");
  const local = side("", read.number("tp_rank"), ["l0", "l1"], read.number("block_len"));
  const remoteNames = read.strings("remote_names");
  if (remoteNames.length !== read.number("remote_regions"))
    throw new Difference("as many names as regions are expected");
  const facts = checkCompatibility({
    local,
    remote: side("remote_", 0, remoteNames, read.number("remote_block_stride")),
    numKvHeads: read.number("kv_heads"),
    groups: read.boolean("has_mamba") ? [kind, "mamba"] : [kind],
    conversions: ["attention-order", ...(permute ? (["hnd-to-nhd"] as const) : [])],
    hybridCache: read.boolean("is_hma_required"),
    prefixCaching: read.boolean("prefix_caching"),
  });
  return {
    ok: true,
    enable_permute_local_kv: facts.conversions.includes("hnd-to-nhd"),
    // vLLM records different attention backends only when the local one is its CPU backend.
    hetero_attn_post_process:
      facts.conversions.includes("attention-order") && local.attentionBackend === "CPU_ATTN",
  };
};

function layout(name: string): KvCacheLayout {
  const found = KV_CACHE_LAYOUTS.find((one) => one === name);
  if (found === undefined) throw new Difference(`layout "${name}" is not known here`);
  return found;
}

/** A kind of vector. A field that only its inputs have identifies it, so that files may have any name. */
interface Family {
  readonly name: string;
  readonly field: string;
  readonly replay: Replay;
}

const FAMILIES: readonly Family[] = [
  { name: "block_ids", field: "fn", replay: replayBlockIds },
  { name: "descs", field: "local_bases", replay: replayDescriptors },
  { name: "desc_ids", field: "dst_num_blocks", replay: replayDescriptorIds },
  { name: "validate", field: "remote_block_stride", replay: replayValidate },
  { name: "tp_mapping", field: "remote_tp_size", replay: replayTpMapping },
];

export function familyOf(input: Readonly<Record<string, unknown>>): Family | undefined {
  return FAMILIES.find((family) => family.field in input);
}
