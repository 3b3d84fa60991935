import { KV_CACHE_LAYOUTS, type KvCacheLayout, type MemoryType } from "@kv/interface";
import { decodeMsgpack, encodeMsgpack, isMap, MapFields } from "../encoding/messages.js";

/** Large hybrids have some hundred regions. */
const MAX_REGIONS = 100_000;

/**
 * One rank's metadata in the handshake: vLLM's `NixlAgentMetadata`. Lists are by region unless they
 * say otherwise. `rest` keeps unknown fields, so that it encodes to the same bytes again.
 */
export interface AgentMetadata {
  readonly engineId: string;
  /** Argument of `Agent.addRemote`. */
  readonly agentMetadata: Uint8Array;
  readonly baseAddresses: readonly number[];
  /** The device's ordinal in the rank's process; 0 for host memory. */
  readonly deviceId: number;
  /** Kernel blocks per region, where `regionNumBlocks` is absent. */
  readonly numBlocks: number;
  readonly blockLengthsBytes: readonly number[];
  /** Distance between the starts of blocks. */
  readonly blockStridesBytes: readonly number[];
  readonly kvCacheLayout: KvCacheLayout;
  readonly blockSize: number;
  /** Bytes of a block's convolution and recurrent state; `[0, 0]` without state-space layers. */
  readonly ssmSizes: readonly number[];
  readonly attentionBackend: string;
  /** Kernel blocks per logical block (vLLM: `physical_blocks_per_logical_kv_block`). */
  readonly physicalBlocksPerLogical: number;
  /** Kernel blocks. Connector version 11 and later. */
  readonly regionNumBlocks?: readonly number[] | undefined;
  /** KV cache group; -1 for a region that all groups share. Connector version 11 and later. */
  readonly regionGroupIds?: readonly number[] | undefined;
  /** Names such as "model.layers.0.self_attn.attn". */
  readonly regionNames?: readonly string[] | undefined;
  /** Connector version 11 and later. */
  readonly regionMemoryTypes?: readonly MemoryType[] | undefined;
  readonly dcpSize: number;
  readonly pcpSize: number;
  /** vLLM's `ple_block_len`; null for a model without such a cache. Connector version 15. */
  readonly pleBlockLengthBytes: number | null;
  /** Caches that share each region; empty where none do. Connector version 12 and later. */
  readonly regionMembers: readonly (readonly string[])[];
  /** By cache in another's pages: `[offsetBytes, lengthBytes]`. Connector version 13 and later. */
  readonly packedMemberLayouts: Readonly<Record<string, readonly number[]>>;
  readonly rest: Readonly<Record<string, unknown>>;
}

/**
 * Encodes all of vLLM 0.33's fields in vLLM's order, absent ones as null like msgspec.
 *
 * @throws `KV_INTERNAL` as `encodeMsgpack`.
 */
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

/**
 * Decodes and validates a rank's metadata.
 *
 * @throws `KV_WIRE_MALFORMED` naming the field and its value, also for a list that is not as long
 * as `kv_caches_base_addr`; `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodeAgentMetadata(bytes: Uint8Array): AgentMetadata {
  const what = "agent metadata";
  const fields = new MapFields(decodeMsgpack(bytes, what), { what, maxItems: MAX_REGIONS });
  const baseAddresses = requiredList(fields, "kv_caches_base_addr");
  const regions = baseAddresses.length;
  const perRegion = <T>(name: string, list: readonly T[] | undefined): readonly T[] | undefined => {
    if (list === undefined || list.length === regions) return list;
    throw fields.malformed(
      name,
      `a list of ${regions}, one per entry of kv_caches_base_addr`,
      list,
    );
  };
  const blockLengthsBytes = perRegion("block_lens", requiredList(fields, "block_lens")) ?? [];
  return {
    engineId: fields.string("engine_id"),
    agentMetadata: fields.bytes("agent_metadata"),
    baseAddresses,
    deviceId: fields.integer("device_id"),
    numBlocks: fields.integer("num_blocks", { min: 1 }),
    blockLengthsBytes,
    blockStridesBytes:
      perRegion("block_strides", fields.integers("block_strides", { min: 1 })) ?? blockLengthsBytes,
    kvCacheLayout: layout(fields),
    blockSize: fields.integer("block_size", { min: 1 }),
    ssmSizes: ssmSizes(fields),
    attentionBackend: fields.string("attn_backend_name"),
    physicalBlocksPerLogical: fields.integer("physical_blocks_per_logical_kv_block", {
      min: 1,
      fallback: 1,
    }),
    regionNumBlocks: perRegion(
      "region_num_blocks",
      fields.integers("region_num_blocks", { min: 1 }),
    ),
    regionGroupIds: perRegion("region_group_ids", fields.integers("region_group_ids", { min: -1 })),
    regionNames: perRegion("region_names", fields.strings("region_names")),
    regionMemoryTypes: perRegion("region_mem_types", memoryTypes(fields)),
    dcpSize: fields.integer("dcp_size", { min: 1, fallback: 1 }),
    pcpSize: fields.integer("pcp_size", { min: 1, fallback: 1 }),
    pleBlockLengthBytes: fields.optionalInteger("ple_block_len") ?? null,
    regionMembers: regionMembers(fields),
    packedMemberLayouts: packedMemberLayouts(fields),
    rest: fields.rest(),
  };
}

function requiredList(fields: MapFields, name: string): readonly number[] {
  const list = fields.integers(name, { min: 1 });
  if (list === undefined || list.length === 0)
    throw fields.malformed(name, "a list with an entry per region", list);
  return list;
}

function ssmSizes(fields: MapFields): readonly number[] {
  const sizes = fields.integers("ssm_sizes") ?? [0, 0];
  if (sizes.length === 2) return sizes;
  throw fields.malformed(
    "ssm_sizes",
    "a list of two: convolution state and recurrent state",
    sizes,
  );
}

function memoryTypes(fields: MapFields): readonly MemoryType[] | undefined {
  return fields.strings("region_mem_types")?.map((name) => {
    if (name === "DRAM" || name === "VRAM") return name;
    throw fields.malformed("region_mem_types", "DRAM or VRAM", name);
  });
}

/** vLLM before 0.29 sends the layout's older name. */
function layout(fields: MapFields): KvCacheLayout {
  const name = fields.string("kv_cache_layout");
  if (name === "HND") return "LBHNC";
  if (name === "NHD") return "LBNHC";
  const known = KV_CACHE_LAYOUTS.find((each) => each === name);
  if (known !== undefined) return known;
  throw fields.malformed("kv_cache_layout", `one of ${KV_CACHE_LAYOUTS.join(", ")}`, name);
}

function regionMembers(fields: MapFields): readonly (readonly string[])[] {
  const value = fields.raw("region_members");
  if (value === undefined || value === null) return [];
  const isNames = (item: unknown): item is string[] =>
    Array.isArray(item) && item.every((name) => typeof name === "string");
  if (Array.isArray(value) && value.every(isNames)) return value;
  throw fields.malformed("region_members", "a list of lists of names", value);
}

function packedMemberLayouts(fields: MapFields): Readonly<Record<string, readonly number[]>> {
  const value = fields.raw("packed_member_layouts");
  if (value === undefined || value === null) return {};
  const isOffsetAndLength = (item: unknown): item is number[] =>
    Array.isArray(item) &&
    item.length === 2 &&
    item.every((n) => Number.isSafeInteger(n) && n >= 0);
  if (isMap(value) && Object.values(value).every(isOffsetAndLength))
    return value as Record<string, readonly number[]>;
  throw fields.malformed("packed_member_layouts", "a map of names to [offset, bytes]", value);
}
