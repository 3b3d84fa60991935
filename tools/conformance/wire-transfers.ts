import type { BlockIds, KvCacheKind, KvCacheLayout } from "@kv/interface";
import {
  buildEngineTransferPlan,
  type EngineTransferPlan,
  planRequest,
  type RankGeometry,
  type RequestRead,
  type StateSpaceGeometry,
} from "@kv/plan";
import { decodeDone } from "@kv/protocol";
import { computeTpMapping, handshakeTargetRanks } from "@kv/topology";
import { indicesOf, mappingAsJson } from "./families.js";
import { fields } from "./fields.js";
import { Difference } from "./outcome.js";
import { type Recorded, record, same } from "./recordings.js";
import { computeDescriptorIds } from "./vllm-descriptor-ids.js";

/** Workers by process id. */
export interface RecordedRun {
  readonly workers: ReadonlyMap<number, Worker>;
}

interface Worker {
  readonly geometry: RankGeometry;
  readonly proc: unknown;
  numKvHeads: number;
  readonly isMla: boolean;
  readonly groups: readonly KvCacheKind[];
  readonly remotes: LoadedRank[];
  readonly mappings: unknown[];
}

/** A worker may meet several engines, and one engine several times. */
interface LoadedRank {
  readonly engineId: string;
  /** On the recording's clock, in seconds. */
  readonly loadedAt: number;
  readonly geometry: RankGeometry;
}

/**
 * `kv_caches`: the workers' own regions. `agents`: metadata that they loaded, and TP mappings that
 * they computed.
 */
export function recordedRun(
  kvCaches: readonly Recorded[],
  agents: readonly Recorded[],
): RecordedRun {
  const workers = new Map<number, Worker>();
  for (const line of kvCaches) workers.set(Number(line["pid"]), workerOf(line));
  // Heads times TP is too large for a rank that holds a replica: the smallest product is the
  // model's number of KV heads.
  const total = Math.min(...[...workers.values()].map(({ numKvHeads }) => numKvHeads));
  for (const worker of workers.values()) worker.numKvHeads = total;
  for (const line of agents) {
    const worker = workers.get(Number(line["pid"]));
    if (worker === undefined)
      throw new Difference(`process ${line["pid"]} loaded metadata and has no caches`);
    if (line["meta"] !== undefined) {
      const meta = record(line["meta"], "meta");
      worker.remotes.push({
        engineId: fields(meta).string("engine_id"),
        loadedAt: Number(line["t"] ?? 0),
        geometry: remoteOf(meta, line["args"]),
      });
    }
    if (line["tp_mapping"] !== undefined) worker.mappings.push(line["tp_mapping"]);
  }
  return { workers };
}

function workerOf(line: Recorded): Worker {
  const read = fields(record(line["fields"], "fields"));
  const caches = record(line["kv_caches"], "kv_caches");
  const names = read.strings("region_names");
  const shapes = names.map((name) => fields(record(caches[name], name)));
  const geometry: RankGeometry = {
    tpRank: read.number("tp_rank"),
    tpSize: read.number("world_size"),
    kernelBlockSize: read.number("block_size"),
    physicalBlocksPerLogical: read.number("_physical_blocks_per_logical_kv_block"),
    layout: read.string("kv_cache_layout") as KvCacheLayout,
    attentionBackend: read.string("backend_name"),
    deviceId: read.number("device_id"),
    regions: regionsOf(read, {
      addresses: shapes.map((shape) => shape.number("ptr")),
      lengths: read.numbers("block_len_per_layer"),
      strides: read.numbers("block_stride_per_layer"),
    }),
  };
  // The cache's second dimension is this rank's heads.
  const isMla = read.boolean("use_mla");
  const heads = isMla
    ? 1
    : (shapes.find((shape) => shape.present("shape"))?.numbers("shape")[1] ?? 1);
  const attention: KvCacheKind = isMla ? "mla" : "full";
  const numGroups = Math.max(0, ...read.numbers("region_group_ids")) + 1;
  const kinds = read.boolean("_has_mamba")
    ? [attention, "mamba"]
    : Array.from({ length: numGroups }, () => attention);
  return {
    geometry: { ...geometry, ...stateOf(read.numbers("_mamba_ssm_size")) },
    proc: line["proc"],
    numKvHeads: isMla ? 1 : heads * geometry.tpSize,
    isMla,
    groups: kinds,
    remotes: [],
    mappings: [],
  };
}

function stateOf([convBytes = 0, recurrentBytes = 0]: readonly number[]): {
  stateSpace?: StateSpaceGeometry;
} {
  return convBytes + recurrentBytes === 0 ? {} : { stateSpace: { convBytes, recurrentBytes } };
}

function remoteOf(meta: Recorded, args: unknown): RankGeometry {
  const read = fields(meta);
  const [tpRank = 0, tpSize = 1] = Array.isArray(args) ? (args as number[]) : [];
  return {
    tpRank,
    tpSize,
    dcpSize: read.numberOr("dcp_size", 1),
    kernelBlockSize: read.number("block_size"),
    physicalBlocksPerLogical: read.number("physical_blocks_per_logical_kv_block"),
    layout: read.string("kv_cache_layout") as KvCacheLayout,
    attentionBackend: read.string("attn_backend_name"),
    deviceId: read.number("device_id"),
    ...stateOf(read.optionalNumbers("ssm_sizes") ?? []),
    regions: regionsOf(read, {
      addresses: read.numbers("kv_caches_base_addr"),
      lengths: read.numbers("block_lens"),
      strides: read.numbers("block_strides"),
    }),
  };
}

/** With the line's counts of blocks, groups and types of memory. */
function regionsOf(
  read: ReturnType<typeof fields>,
  {
    addresses,
    lengths,
    strides,
  }: Readonly<Record<"addresses" | "lengths" | "strides", readonly number[]>>,
): RankGeometry["regions"] {
  const [counts, groups] = [read.numbers("region_num_blocks"), read.numbers("region_group_ids")];
  const [names, memory] = [read.strings("region_names"), read.strings("region_mem_types")];
  return addresses.map((baseAddress, index) => ({
    name: names[index] ?? "",
    baseAddress,
    numBlocks: counts[index] ?? 0,
    blockLengthBytes: lengths[index] ?? 0,
    blockStrideBytes: strides[index] ?? 0,
    groupId: groups[index] ?? 0,
    memoryType: memory[index] === "DRAM" ? "DRAM" : "VRAM",
  }));
}

/** Each follows from the own rank and the remote's TP size. */
export function checkMappings(worker: Worker): void {
  if (worker.mappings.length !== worker.remotes.length)
    throw new Difference("a mapping per loaded rank is expected");
  for (const [index, theirs] of worker.mappings.entries()) {
    const { _t, ...mapping } = record(theirs, "tp_mapping");
    const ours = computeTpMapping({
      tpRank: worker.geometry.tpRank,
      tpSize: worker.geometry.tpSize,
      remoteTpSize: worker.remotes[index]?.geometry.tpSize ?? 1,
      numKvHeads: worker.numKvHeads,
      isMla: worker.isMla,
      groups: worker.groups,
      dcpSize: worker.geometry.dcpSize ?? 1,
      remoteDcpSize: worker.remotes[index]?.geometry.dcpSize ?? 1,
    });
    same("mapping", mappingAsJson(ours), mapping);
  }
}

export function checkDescriptorIds(line: Recorded): void {
  const read = fields(record(line["compute_desc_ids"], "compute_desc_ids"));
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
    blockSizeRatio: read.optionalNumber("block_size_ratio"),
  });
  same("ids", ids, line["ret"]);
}

/** Of one request, as the schedulers exchanged them: logical, per group. */
export interface ExchangedBlocks {
  readonly remoteEngineId?: string | undefined;
  readonly localBlockIds: BlockIds;
  readonly remoteBlockIds: BlockIds;
  readonly numTokens?: number;
  readonly localComputedBlocks?: readonly number[];
}

function doneOf(transfer: Recorded): { readonly requestId: string; readonly readers: number } {
  const notification = String(transfer["notif"]);
  const done = decodeDone(new TextEncoder().encode(notification));
  if (done === undefined)
    throw new Difference(`the notification ${notification} has no known form`);
  return done;
}

/** Of the request that a transfer names, where the run's recordings have them. */
export function exchangedBlocks(
  transfer: Recorded,
  beside: {
    readonly metadata: readonly Recorded[];
    readonly notifications: readonly Recorded[];
    readonly proc: unknown;
  },
): ExchangedBlocks | undefined {
  const { requestId } = doneOf(transfer);
  const steps = beside.metadata
    .filter((line) => line["proc"] === beside.proc)
    .map((line) => record(line["meta"], "meta"));
  if (transfer["op"] === "READ") {
    for (const step of steps) {
      for (const entry of Object.values(record(step["reqs_to_recv"] ?? {}, "reqs_to_recv"))) {
        const wanted = fields(record(entry, "reqs_to_recv"));
        const remote = record((entry as Recorded)["remote"] ?? {}, "remote");
        if (remote["request_id"] !== requestId || !wanted.present("local_block_ids")) continue;
        const read = fields(remote);
        const numTokens = read.optionalNumber("num_tokens");
        const computed = wanted.optionalNumbers("local_num_computed_blocks");
        return {
          remoteEngineId: read.present("engine_id") ? read.string("engine_id") : undefined,
          localBlockIds: wanted.blockIds("local_block_ids"),
          remoteBlockIds: read.blockIds("block_ids"),
          ...(numTokens === undefined ? {} : { numTokens }),
          ...(computed === undefined || computed.length === 0
            ? {}
            : { localComputedBlocks: computed }),
        };
      }
    }
    return undefined;
  }
  const base = (id: unknown) => String(id).replace(/-[0-9a-f]{8}$/i, "");
  const finished = steps
    .flatMap((step) =>
      Object.entries(record(step["push_finished_blocks"] ?? {}, "push_finished_blocks")),
    )
    .find(([id]) => base(id) === base(requestId));
  const registration = beside.notifications
    .filter((line) => line["pid"] === transfer["pid"])
    .map((line) => record(line["decoded"] ?? {}, "decoded")["msgpack"])
    .find((told) => told !== undefined && record(told, "msgpack")["request_id"] === requestId);
  if (finished === undefined || registration === undefined) return undefined;
  const registered = fields(record(registration, "msgpack"));
  return {
    remoteEngineId: registered.string("decode_engine_id"),
    localBlockIds: finished[1] as BlockIds,
    remoteBlockIds: registered.blockIds("local_block_ids"),
  };
}

/**
 * Plans a recorded transfer again. The pairs of indices must equal those that vLLM posted, in any
 * order: ours merges better. `nth`: transfers of the request that the worker had posted before, one
 * for each remote rank.
 */
export function checkTransfer(
  worker: Worker,
  exchanged: ExchangedBlocks,
  line: Recorded,
  nth: number,
): void {
  const remotes = remotesOf(
    worker,
    exchanged.remoteEngineId,
    Number(line["t"] ?? Number.POSITIVE_INFINITY),
  );
  const { ours, awaited } =
    line["op"] === "WRITE"
      ? written(worker, remotes, exchanged, nth)
      : read(worker, remotes, exchanged, nth);
  same("pairs", ours, pairs(fields(line).numbers("local_idx"), fields(line).numbers("remote_idx")));
  same("notifications awaited", awaited, doneOf(line).readers);
}

/** For each rank the metadata that the worker had loaded last before the transfer. */
function remotesOf(worker: Worker, engineId: string | undefined, postedAt: number): RankGeometry[] {
  const engines = new Set(worker.remotes.map((rank) => rank.engineId));
  const [only] = engines;
  const wanted = engineId !== undefined && engines.has(engineId) ? engineId : only;
  if (engines.size > 1 && wanted !== engineId)
    throw new Difference(
      `the worker met engines ${[...engines].join(", ")}, and the recordings do not say which one`,
    );
  const byRank = new Map<number, RankGeometry>();
  for (const rank of worker.remotes) {
    const isKnown = byRank.has(rank.geometry.tpRank);
    if (rank.engineId !== wanted || (isKnown && rank.loadedAt > postedAt)) continue;
    byRank.set(rank.geometry.tpRank, rank.geometry);
  }
  return [...byRank.values()];
}

interface Replayed {
  readonly ours: readonly string[];
  readonly awaited: number;
}

function planOf(
  worker: Worker,
  local: RankGeometry,
  remotes: readonly RankGeometry[],
): EngineTransferPlan {
  return buildEngineTransferPlan({
    local,
    remotes,
    numKvHeads: worker.numKvHeads,
    groups: worker.groups,
    conversions: ["attention-order"],
    prefixCaching: false,
    form: "permute",
  });
}

function read(
  worker: Worker,
  remotes: readonly RankGeometry[],
  exchanged: ExchangedBlocks,
  nth: number,
): Replayed {
  const plan = planOf(worker, worker.geometry, remotes);
  const found = transfer(planRequest(plan, exchanged).reads, nth);
  const [local, remote] = inTheirIndices(plan, found);
  return { ours: pairs(local, remote), awaited: plan.localConsumers };
}

/** A WRITE is planned as the READ that the remote rank would do, as in `@kv/push`. */
function written(
  worker: Worker,
  remotes: readonly RankGeometry[],
  exchanged: ExchangedBlocks,
  nth: number,
): Replayed {
  const { geometry } = worker;
  const targets = [...remotes].sort((one, other) => one.tpRank - other.tpRank);
  const reads = targets.flatMap((local) => {
    const { tpRank, tpSize } = local;
    const sources = handshakeTargetRanks({ tpRank, tpSize, remoteTpSize: geometry.tpSize });
    const ranks = sources.map((source) => ({ ...geometry, tpRank: source }));
    const plan = planOf(worker, local, ranks);
    const request = planRequest(plan, {
      ...exchanged,
      localBlockIds: exchanged.remoteBlockIds,
      remoteBlockIds: exchanged.localBlockIds,
    });
    return request.reads
      .filter(({ remoteRank }) => remoteRank === geometry.tpRank)
      .map((one) => ({ plan, one }));
  });
  const { plan, one } = transfer(reads, nth);
  const [theirs, ours] = inTheirIndices(plan, one);
  return { ours: pairs(ours, theirs), awaited: geometry.tpSize };
}

function transfer<Read>(reads: readonly Read[], nth: number): Read {
  const found = reads[nth];
  if (found !== undefined) return found;
  throw new Difference(`vLLM posted ${nth + 1} transfers of the request, we plan ${reads.length}`);
}

function inTheirIndices(
  plan: EngineTransferPlan,
  { sourceIndex, localIds, remoteIds }: RequestRead,
): [number[], number[]] {
  const remoteIndexing = plan.sources[sourceIndex]?.remoteIndexing ?? [];
  return [
    indicesOf(plan, plan.localIndexing, localIds, "localParts"),
    indicesOf(plan, remoteIndexing, remoteIds, "remoteParts"),
  ];
}

function pairs(local: readonly number[], remote: readonly number[]): string[] {
  return local.map((id, index) => `${id}<${remote[index]}`).sort();
}
