import type { KvCacheLayout } from "@kv/interface";
import { buildEngineTransferPlan, computeDescriptorIds, planRequest, type RankGeometry } from "@kv/plan";
import { computeTpMapping } from "@kv/topology";
import { fields } from "./fields.js";
import { Difference } from "./outcome.js";
import { type Recorded, record, same } from "./recordings.js";
import { mappingAsJson } from "./tp-mapping.js";

/** What one recorded run tells of its workers, by process id. */
export interface RecordedRun {
  readonly workers: ReadonlyMap<number, Worker>;
}

interface Worker {
  readonly geometry: RankGeometry;
  readonly numKvHeads: number;
  readonly isMla: boolean;
  /** Ranks of the other engine, in the order in which they were loaded. */
  readonly remotes: RankGeometry[];
  readonly mappings: unknown[];
}

/** `kv_caches`: the worker's own regions. `agents`: the metadata that it loaded, and the mapping that it made of it. */
export function recordedRun(kvCaches: readonly Recorded[], agents: readonly Recorded[]): RecordedRun {
  const workers = new Map<number, Worker>();
  for (const line of kvCaches) workers.set(Number(line["pid"]), workerOf(line));
  for (const line of agents) {
    const worker = workers.get(Number(line["pid"]));
    if (worker === undefined)
      throw new Difference(`process ${line["pid"]} loaded metadata and has no caches`);
    if (line["meta"] !== undefined) worker.remotes.push(remoteOf(record(line["meta"], "meta"), line["args"]));
    if (line["tp_mapping"] !== undefined) worker.mappings.push(line["tp_mapping"]);
  }
  return { workers };
}

function workerOf(line: Recorded): Worker {
  const read = fields(record(line["fields"], "fields"));
  const caches = record(line["kv_caches"], "kv_caches");
  const names = read.strings("region_names");
  const shapes = names.map((name) => fields(record(caches[name], name)));
  const [lengths, strides] = [read.numbers("block_len_per_layer"), read.numbers("block_stride_per_layer")];
  const [counts, groups] = [read.numbers("region_num_blocks"), read.numbers("region_group_ids")];
  const memory = read.strings("region_mem_types");
  const geometry: RankGeometry = {
    tpRank: read.number("tp_rank"),
    tpSize: read.number("world_size"),
    kernelBlockSize: read.number("block_size"),
    physicalBlocksPerLogical: read.number("_physical_blocks_per_logical_kv_block"),
    layout: read.string("kv_cache_layout") as KvCacheLayout,
    attentionBackend: read.string("backend_name"),
    deviceId: read.number("device_id"),
    regions: names.map((name, index) => ({
      name,
      baseAddress: shapes[index]?.number("ptr") ?? 0,
      numBlocks: counts[index] ?? 0,
      blockLengthBytes: lengths[index] ?? 0,
      blockStrideBytes: strides[index] ?? 0,
      groupId: groups[index] ?? 0,
      memoryType: memory[index] === "DRAM" ? "DRAM" : "VRAM",
    })),
  };
  // The cache's second dimension is this rank's heads; the recorded models have at least as many heads as ranks.
  const heads = shapes[0]?.numbers("shape")[1] ?? 1;
  const isMla = read.boolean("use_mla");
  return { geometry, numKvHeads: isMla ? 1 : heads * geometry.tpSize, isMla, remotes: [], mappings: [] };
}

function remoteOf(meta: Recorded, args: unknown): RankGeometry {
  const read = fields(meta);
  const [tpRank = 0, tpSize = 1] = Array.isArray(args) ? (args as number[]) : [];
  const [lengths, strides] = [read.numbers("block_lens"), read.numbers("block_strides")];
  const names = read.strings("region_names");
  return {
    tpRank,
    tpSize,
    dcpSize: read.numberOr("dcp_size", 1),
    kernelBlockSize: read.number("block_size"),
    physicalBlocksPerLogical: read.number("physical_blocks_per_logical_kv_block"),
    layout: read.string("kv_cache_layout") as KvCacheLayout,
    attentionBackend: read.string("attn_backend_name"),
    deviceId: read.number("device_id"),
    regions: read.numbers("kv_caches_base_addr").map((baseAddress, index) => ({
      name: names[index] ?? "",
      baseAddress,
      numBlocks: read.numbers("region_num_blocks")[index] ?? 0,
      blockLengthBytes: lengths[index] ?? 0,
      blockStrideBytes: strides[index] ?? 0,
      groupId: read.numbers("region_group_ids")[index] ?? 0,
      memoryType: read.strings("region_mem_types")[index] === "DRAM" ? "DRAM" : "VRAM",
    })),
  };
}

/** Every mapping that a worker made follows from its own place and the remote's size. */
export function checkMappings(worker: Worker): void {
  if (worker.mappings.length !== worker.remotes.length)
    throw new Difference("a mapping per loaded rank is expected");
  for (const [index, theirs] of worker.mappings.entries()) {
    const { _t, ...mapping } = record(theirs, "tp_mapping");
    const ours = computeTpMapping({
      tpRank: worker.geometry.tpRank,
      tpSize: worker.geometry.tpSize,
      remoteTpSize: worker.remotes[index]?.tpSize ?? 1,
      numKvHeads: worker.numKvHeads,
      isMla: worker.isMla,
      groups: [worker.isMla ? "mla" : "full"],
    });
    same("mapping", mappingAsJson(ours), mapping);
  }
}

/** A recorded call of `_compute_desc_ids`. */
export function checkDescriptorIds(line: Recorded): void {
  const read = fields(record(line["compute_desc_ids"], "compute_desc_ids"));
  const ratio = read.optionalNumber("block_size_ratio");
  const regionNumBlocks = read.numbers("region_num_blocks");
  const ids = computeDescriptorIds({
    groups: read.blockIds("block_ids").map(() => "full" as const),
    blockIds: read.blockIds("block_ids"),
    numRegions: regionNumBlocks.length,
    numBlocks: read.number("dst_num_blocks"),
    regionNumBlocks,
    regionGroupIds: read.numbers("region_group_ids"),
    usesRegionGroupMapping: read.boolean("uses_region_group_mapping"),
    physicalBlocksPerLogical: read.number("physical_blocks_per_logical"),
    ...(ratio === undefined ? {} : { blockSizeRatio: ratio }),
  });
  same("ids", ids, line["ret"]);
}

/**
 * A recorded transfer, from end to end: of both sides' metadata and the block ids, the very pairs of indices that vLLM used. Ours are in
 * an order that merges better, so pairs are compared, not positions.
 */
export function checkTransfer(worker: Worker, local: Recorded, remote: Recorded, line: Recorded): void {
  const plan = buildEngineTransferPlan({
    local: worker.geometry,
    remotes: worker.remotes,
    numKvHeads: worker.numKvHeads,
    groups: [worker.isMla ? "mla" : "full"],
  });
  const blockIds = (call: Recorded) =>
    fields(record(call["compute_desc_ids"], "compute_desc_ids")).blockIds("block_ids");
  const request = planRequest(plan, { localBlockIds: blockIds(local), remoteBlockIds: blockIds(remote) });
  const theirs = pairs(fields(line).numbers("local_idx"), fields(line).numbers("remote_idx"));
  for (const read of request.reads) same("pairs", pairs([...read.localIds], [...read.remoteIds]), theirs);
  if (line["op"] === "READ") {
    const notification = String(line["notif"]);
    same(
      "notifications awaited",
      plan.localConsumers,
      Number(notification.slice(notification.lastIndexOf(":") + 1)),
    );
  }
}

function pairs(local: readonly number[], remote: readonly number[]): string[] {
  return local.map((id, index) => `${id}<${remote[index]}`).sort();
}
