import {
  DESCRIPTOR_ROW,
  type DescriptorTable,
  descriptorPairs,
  KV_CACHE_LAYOUTS,
  type KvCacheLayout,
  KvError,
} from "@kv/interface";
import {
  buildEngineTransferPlan,
  checkCompatibility,
  type EngineTransferPlan,
  type RankGeometry,
  type RegionIndexing,
} from "@kv/plan";
import {
  computeTpMapping,
  dcpConsumerCount,
  handshakeTargetRanks,
  kvReplication,
  targetRemoteRanks,
  tpRatio,
} from "@kv/topology";
import { pairDealt } from "../../packages/plan/src/request/dcp-blocks.js";
import { Runs } from "../../packages/plan/src/request/request-read.js";
import { fields } from "./fields.js";
import { Difference, type Replay } from "./outcome.js";
import { same } from "./recordings.js";
import { applyPrefixCaching } from "./vllm-block-ids.js";
import { computeDescriptorIds } from "./vllm-descriptor-ids.js";

type Descriptor = readonly [address: number, lengthBytes: number, deviceId: number];

/**
 * vLLM's `_build_fa_local`, `_build_fa_remote`, their state-space counterparts and
 * `_build_local_splits_from_plan`, against the tables of a whole plan, by region, block and part.
 */
export const replayDescriptors: Replay = (input, expected) => {
  const plan = planOf(input);
  const summary = {
    tp_ratio:
      fields(input).number("tp_size") >= fields(input).number("remote_tp_size")
        ? plan.local.tpSize / plan.remote.tpSize
        : -(plan.remote.tpSize / plan.local.tpSize),
    block_size_ratio: plan.blockSizeRatio,
    mapping: mappingAsJson(plan.mapping),
  };
  for (const source of plan.sources) [source.localTable, source.remoteTable].forEach(expand);
  if (expected === undefined) return summary;
  const theirs = expected as {
    local: Descriptor[];
    remote: Descriptor[];
    splits?: Descriptor[][];
    needs_split: boolean;
    local_raw: unknown;
    remote_raw: unknown;
  };
  const local = theirs.needs_split ? (theirs.splits ?? []) : plan.sources.map(() => theirs.local);
  if (local.length !== plan.sources.length)
    throw new Difference(`${plan.sources.length} sources, vLLM has ${local.length}`);
  for (const [index, source] of plan.sources.entries()) {
    same(
      `local table of source ${index}`,
      inTheirOrder(plan, expand(source.localTable)),
      local[index],
    );
    same(`remote table of source ${index}`, expand(source.remoteTable), theirs.remote);
  }
  const {
    local: _l,
    remote: _r,
    splits: _s,
    needs_split: _n,
    local_raw: _lr,
    remote_raw: _rr,
    ...rest
  } = theirs;
  same("summary", summary, rest);
  return expected;
};

function planOf(input: Readonly<Record<string, unknown>>): EngineTransferPlan {
  const read = fields(input);
  const side = (who: "local" | "remote"): RankGeometry => {
    const prefix = who === "local" ? "" : "remote_";
    const [lengths, strides] = [
      read.numbers(`${who}_block_lens`),
      read.numbers(`${who}_block_strides`),
    ];
    return {
      tpRank: who === "local" ? read.number("tp_rank") : 0,
      tpSize: read.number(`${prefix}tp_size`),
      kernelBlockSize: read.number(`${prefix}block_size`),
      physicalBlocksPerLogical: read.number(`${prefix}ppl`),
      ...stateSpace(read, who),
      layout: "LBHNC",
      attentionBackend: "FLASH_ATTN",
      deviceId: read.number(`${prefix}device_id`),
      regions: read.numbers(`${who}_bases`).map((baseAddress, index) => ({
        name: `layer.${index}`,
        baseAddress,
        numBlocks: read.number(`${who}_num_blocks`),
        blockLengthBytes: lengths[index] ?? 0,
        blockStrideBytes: strides[index] ?? 0,
        groupId: read.numbers("region_group_ids")[index] ?? 0,
        memoryType: "VRAM",
      })),
    };
  };
  const remote = side("remote");
  const ratio = remote.tpSize / read.number("tp_size");
  const first = Math.floor(read.number("tp_rank") * ratio);
  return buildEngineTransferPlan({
    local: side("local"),
    remotes: Array.from({ length: Math.max(1, ratio) }, (_, index) => ({
      ...remote,
      tpRank: first + index,
    })),
    numKvHeads: read.number("kv_heads"),
    groups: read.kinds("groups"),
    // vLLM's only form for different block sizes, with and without prefix caching.
    form: "permute",
    prefixCaching: false,
  });
}

/**
 * Vectors give the dimensions of the convolution's projections. Bytes per dimension follow from the
 * remote's total.
 */
function stateSpace(
  read: ReturnType<typeof fields>,
  who: "local" | "remote",
): Pick<RankGeometry, "stateSpace"> {
  if (!read.boolean("mamba")) return {};
  const [convBytes = 0, recurrentBytes = 0] = read.numbers("remote_ssm_sizes");
  if (who === "remote") return { stateSpace: { convBytes, recurrentBytes } };
  const dims = read.numbers("local_conv_dims");
  const ofModel = dims.reduce((sum, dim) => sum + dim, 0) * read.number("tp_size");
  const bytesPerDim = (convBytes * read.number("remote_tp_size")) / ofModel;
  const convProjectionBytes = dims.map((dim) => dim * bytesPerDim);
  return {
    stateSpace: {
      convProjectionBytes,
      convBytes: convProjectionBytes.reduce((sum, bytes) => sum + bytes, 0),
      recurrentBytes: read.number("local_ssm_bytes"),
    },
  };
}

function expand(table: DescriptorTable): Descriptor[] {
  const expanded: Descriptor[] = [];
  for (let at = 0; at < table.rows.length; at += DESCRIPTOR_ROW) {
    const [address = 0, lengthBytes = 0, deviceId = 0, stride = 0, count = 0] = table.rows.subarray(
      at,
      at + DESCRIPTOR_ROW,
    );
    for (let index = 0; index < count; index++)
      expanded.push([address + index * stride, lengthBytes, deviceId]);
  }
  return expanded;
}

function inTheirOrder(plan: EngineTransferPlan, ours: readonly Descriptor[]): Descriptor[] {
  const ordered: Descriptor[] = [];
  const places = indicesOf(plan, plan.localIndexing, ours.keys(), "localParts");
  for (const [id, descriptor] of ours.entries()) ordered[places[id] as number] = descriptor;
  return ordered;
}

/**
 * Descriptor ids in vLLM's order, with the parts of a block one after another. Our tables have a row
 * per part when blocks are padded.
 */
export function indicesOf(
  plan: EngineTransferPlan,
  indexing: readonly RegionIndexing[],
  ids: Iterable<number>,
  which: "localParts" | "remoteParts",
): number[] {
  return [...ids].map((id) => {
    const segment = indexing.findIndex(({ offset, count }) => id >= offset && id < offset + count);
    const found = indexing[segment];
    const parts = plan.segments[segment]?.[which] ?? 1;
    if (found === undefined || found.partStep === 1) return id;
    const at = id - found.offset;
    return found.offset + (at % found.partStep) * parts + Math.floor(at / found.partStep);
  });
}

/** vLLM's transformations of block ids; `in.fn` names the function. */
export const replayBlockIds: Replay = (input, expected) => {
  const read = fields(input);
  const fn = read.string("fn");
  if (fn === "apply_dcp_prefix_caching") return dealtBlocks(read, expected);
  const groups = read.kinds("groups");
  if (fn === "logical_to_kernel_block_ids") {
    const ratio = read.number("ratio");
    return read
      .blockIds("block_ids")
      .map((ids, group) =>
        groups[group] === "mamba" ? ids : localParts([ids, ratio], [ids, ratio]),
      );
  }
  if (fn === "map_block_ids_for_block_size_ratio") {
    const [local, remote] = [read.blockIds("local_block_ids"), read.blockIds("remote_block_ids")];
    const mapped = remote.map((ids, group) => {
      const own = local[group] ?? [];
      return groups[group] === "mamba" ? own : localParts([own, read.number("ratio")], [ids, 1]);
    });
    return [mapped.some((ids) => ids.length > 0) ? mapped : [], remote];
  }
  if (fn === "apply_prefix_caching") {
    const trimmed = applyPrefixCaching({
      groups,
      decodeBlockIds: read.blockIds("decode_block_ids"),
      prefillBlockIds: read.blockIds("prefill_block_ids"),
      decodePhysicalPerLogical: read.number("decode_ppl"),
      prefillPhysicalPerLogical: read.number("prefill_ppl"),
    });
    return [trimmed.decodeBlockIds, trimmed.prefillBlockIds];
  }
  throw new Difference(`in.fn names "${fn}", which is not known here`);
};

type BlocksAndParts = readonly [ids: readonly number[], perBlock: number];

/** The local parts that a plan pairs with remote ones, from the front of both lists. */
function localParts(
  [localIds, localPer]: BlocksAndParts,
  [remoteIds, remotePer]: BlocksAndParts,
): Int32Array {
  const count = Math.min(localIds.length * localPer, remoteIds.length * remotePer);
  const runs = new Runs();
  runs.addBlocks({
    localIds,
    remoteIds,
    localPer,
    remotePer,
    count,
    localStart: 0,
    remoteStart: 0,
  });
  return descriptorPairs({ runs: runs.rows }).localIds;
}

function dealtBlocks(read: ReturnType<typeof fields>, expected: unknown): unknown {
  const [dcpSize, remoteDcpSize] = [read.number("local_dcp_size"), read.number("remote_dcp_size")];
  const tpRank = read.number("local_dcp_rank");
  const remoteRank = read.number("remote_rank") % remoteDcpSize;
  const sizes = { tpSize: dcpSize, remoteTpSize: remoteDcpSize, dcpSize, remoteDcpSize };
  if (!handshakeTargetRanks({ tpRank, ...sizes }).includes(remoteRank)) {
    // vLLM's function answers for such a rank too, and neither vLLM nor a plan reads it.
    if (expected !== undefined) return expected;
    throw new KvError("KV_BLOCKS_MISMATCH", `rank ${remoteRank} shares no block`);
  }
  const computed = read.number("local_num_computed_blocks");
  const { localIds, remoteIds } = pairDealt(
    { ids: read.numbers("local_ids"), first: computed * dcpSize + tpRank, step: dcpSize },
    { ids: read.numbers("remote_ids"), first: remoteRank, step: remoteDcpSize },
    read.optionalNumber("num_remote_blocks"),
  );
  return [localIds, remoteIds];
}

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
    regionGroupIds:
      read.optionalNumbers("region_group_ids") ?? read.numbers("self_region_group_ids"),
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

export function mappingAsJson(mapping: ReturnType<typeof computeTpMapping>): unknown {
  return {
    source_ranks_per_group: mapping.sourceRanksPerGroup,
    all_source_ranks: mapping.allSourceRanks,
    rank_to_attention_slot: mapping.rankToAttentionSlot,
    rank_offset_factor: mapping.rankOffsetFactor,
    local_consumers: mapping.localConsumers,
  };
}

/** vLLM's `_validate_remote_agent_handshake`. All regions of a side are alike. */
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
    // vLLM records this only of its CPU backend.
    hetero_attn_post_process:
      facts.conversions.includes("attention-order") && local.attentionBackend === "CPU_ATTN",
  };
};

function layout(name: string): KvCacheLayout {
  const found = KV_CACHE_LAYOUTS.find((one) => one === name);
  if (found === undefined) throw new Difference(`layout "${name}" is not known here`);
  return found;
}

/** Known by a field that only its inputs have: files may have any name. */
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
