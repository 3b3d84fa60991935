import { KV_CACHE_LAYOUTS, type KvCacheLayout, type MemoryType } from "@kv/interface";
import { type Fields, fieldsOf, malformed } from "./fields.js";
import { decodeMsgpack, encodeMsgpack } from "./msgpack.js";

/** Regions of one rank at most: 80 layers have 80, the largest hybrids some hundred. */
const MAX_REGIONS = 100_000;

/**
 * What a rank tells in the handshake: vLLM's `NixlAgentMetadata`, versions 14 (0.32) and 15 (0.33). Lists have one entry per region.
 * Fields that this version does not know are kept in `rest`, so that decoding and encoding give the same bytes.
 */
export interface AgentMetadata {
  readonly engineId: string;
  /** The transport's own bytes: what `Agent.addRemote` takes. */
  readonly agentMetadata: Uint8Array;
  readonly baseAddresses: readonly number[];
  readonly deviceId: number;
  /** Kernel blocks in a region, where `regionNumBlocks` does not say otherwise. */
  readonly numBlocks: number;
  readonly blockLengthsBytes: readonly number[];
  readonly blockStridesBytes: readonly number[];
  readonly kvCacheLayout: KvCacheLayout;
  /** Tokens in a kernel block. */
  readonly blockSize: number;
  readonly ssmSizes: readonly number[];
  readonly attentionBackend: string;
  readonly physicalBlocksPerLogical: number;
  readonly regionNumBlocks?: readonly number[];
  readonly regionGroupIds?: readonly number[];
  readonly regionNames?: readonly string[];
  readonly regionMemoryTypes?: readonly MemoryType[];
  readonly dcpSize: number;
  readonly pcpSize: number;
  readonly pleBlockLengthBytes: number | null;
  readonly regionMembers: readonly (readonly string[])[];
  readonly packedMemberLayouts: Readonly<Record<string, readonly number[]>>;
  readonly rest: Readonly<Record<string, unknown>>;
}

/** All of vLLM 0.33's fields, in its order; what is absent is written as null, as msgspec does. */
export function encodeAgentMetadata(metadata: AgentMetadata): Uint8Array {
  return encodeMsgpack({
    engine_id: metadata.engineId,
    agent_metadata: metadata.agentMetadata,
    kv_caches_base_addr: metadata.baseAddresses,
    device_id: metadata.deviceId,
    num_blocks: metadata.numBlocks,
    block_lens: metadata.blockLengthsBytes,
    block_strides: metadata.blockStridesBytes,
    kv_cache_layout: metadata.kvCacheLayout,
    block_size: metadata.blockSize,
    ssm_sizes: metadata.ssmSizes,
    attn_backend_name: metadata.attentionBackend,
    physical_blocks_per_logical_kv_block: metadata.physicalBlocksPerLogical,
    region_num_blocks: metadata.regionNumBlocks ?? null,
    region_group_ids: metadata.regionGroupIds ?? null,
    region_names: metadata.regionNames ?? null,
    region_mem_types: metadata.regionMemoryTypes ?? null,
    dcp_size: metadata.dcpSize,
    pcp_size: metadata.pcpSize,
    ple_block_len: metadata.pleBlockLengthBytes,
    region_members: metadata.regionMembers,
    packed_member_layouts: metadata.packedMemberLayouts,
    ...metadata.rest,
  });
}

/** Errors: `KV_WIRE_MALFORMED` naming the field and its value, `KV_WIRE_LIMIT_EXCEEDED`. */
export function decodeAgentMetadata(bytes: Uint8Array): AgentMetadata {
  const what = "agent metadata";
  const fields = fieldsOf(decodeMsgpack(bytes, what), what, MAX_REGIONS);
  const baseAddresses = required(fields, "kv_caches_base_addr", what);
  const regions = baseAddresses.length;
  const perRegion = <T>(name: string, list: readonly T[] | undefined): readonly T[] | undefined => {
    if (list === undefined || list.length === regions) return list;
    throw malformed(what, name, `a list of ${regions}, one for each of kv_caches_base_addr`, list);
  };
  const blockLengthsBytes = perRegion("block_lens", required(fields, "block_lens", what)) ?? [];
  const layout = fields.text("kv_cache_layout");
  const regionNumBlocks = perRegion("region_num_blocks", fields.integers("region_num_blocks", { min: 1 }));
  const regionGroupIds = perRegion("region_group_ids", fields.integers("region_group_ids", { min: -1 }));
  const regionNames = perRegion("region_names", fields.texts("region_names"));
  const regionMemoryTypes = perRegion("region_mem_types", fields.texts("region_mem_types")?.map(memoryType));
  return {
    engineId: fields.text("engine_id"),
    agentMetadata: fields.bytes("agent_metadata"),
    baseAddresses,
    deviceId: fields.integer("device_id"),
    numBlocks: fields.integer("num_blocks", { min: 1 }),
    blockLengthsBytes,
    blockStridesBytes:
      perRegion("block_strides", fields.integers("block_strides", { min: 1 })) ?? blockLengthsBytes,
    kvCacheLayout: KV_CACHE_LAYOUTS.find((known) => known === layout) ?? unknownLayout(layout),
    blockSize: fields.integer("block_size", { min: 1 }),
    ssmSizes: pair(fields.integers("ssm_sizes") ?? [0, 0], what),
    attentionBackend: fields.text("attn_backend_name"),
    physicalBlocksPerLogical: fields.integer("physical_blocks_per_logical_kv_block", { min: 1, fallback: 1 }),
    ...(regionNumBlocks === undefined ? {} : { regionNumBlocks }),
    ...(regionGroupIds === undefined ? {} : { regionGroupIds }),
    ...(regionNames === undefined ? {} : { regionNames }),
    ...(regionMemoryTypes === undefined ? {} : { regionMemoryTypes }),
    dcpSize: fields.integer("dcp_size", { min: 1, fallback: 1 }),
    pcpSize: fields.integer("pcp_size", { min: 1, fallback: 1 }),
    pleBlockLengthBytes: fields.raw("ple_block_len") == null ? null : fields.integer("ple_block_len"),
    regionMembers: members(fields.raw("region_members"), what),
    packedMemberLayouts: packed(fields.raw("packed_member_layouts"), what),
    rest: fields.rest(),
  };
}

function required(fields: Fields, name: string, what: string): readonly number[] {
  const list = fields.integers(name, { min: 1 });
  if (list === undefined || list.length === 0)
    throw malformed(what, name, "a list with an entry per region", list);
  return list;
}

function pair(sizes: readonly number[], what: string): readonly number[] {
  if (sizes.length === 2) return sizes;
  throw malformed(what, "ssm_sizes", "a list of two: convolution state and SSM state", sizes);
}

function memoryType(name: string): MemoryType {
  if (name === "DRAM" || name === "VRAM") return name;
  throw malformed("agent metadata", "region_mem_types", "DRAM or VRAM", name);
}

/** Names of layouts that vLLM writes in its older form. */
function unknownLayout(layout: string): KvCacheLayout {
  if (layout === "HND") return "LBHNC";
  if (layout === "NHD") return "LBNHC";
  throw malformed("agent metadata", "kv_cache_layout", `one of ${KV_CACHE_LAYOUTS.join(", ")}`, layout);
}

function members(value: unknown, what: string): readonly (readonly string[])[] {
  if (value === undefined || value === null) return [];
  const isNames = (item: unknown): item is string[] =>
    Array.isArray(item) && item.every((name) => typeof name === "string");
  if (!Array.isArray(value) || !value.every(isNames)) {
    throw malformed(what, "region_members", "a list of lists of names", value);
  }
  return value;
}

function packed(value: unknown, what: string): Readonly<Record<string, readonly number[]>> {
  if (value === undefined || value === null) return {};
  const isPair = (item: unknown): item is number[] =>
    Array.isArray(item) && item.length === 2 && item.every((n) => Number.isSafeInteger(n) && n >= 0);
  const isMap = typeof value === "object" && !Array.isArray(value) && !(value instanceof Uint8Array);
  if (!isMap || !Object.values(value).every(isPair)) {
    throw malformed(what, "packed_member_layouts", "a map of names to (offset, bytes)", value);
  }
  return value as Record<string, readonly number[]>;
}
