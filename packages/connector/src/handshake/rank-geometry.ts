import { type KvCaches, KvError } from "@kv/interface";
import {
  groupBlockTokens,
  type ModelGeometry,
  type RankGeometry,
  type RegionGeometry,
  withCellBytes,
} from "@kv/plan";
import type { AgentMetadata } from "@kv/protocol";

/** Pipeline fields are set only for several stages. */
export type RankPlace = Pick<RankGeometry, "tpRank" | "tpSize" | "ppRank" | "ppSize" | "dcpSize">;

export function localGeometry(caches: KvCaches, rank: RankPlace): RankGeometry {
  const { config, regions } = caches;
  const [first] = regions;
  if (first === undefined)
    throw new KvError("KV_PLAN_INVALID", "a KV cache without a region cannot be registered");
  const { deviceId } = first.memory;
  const layerNames = regions.map(({ name }) => name);
  const names = numberSegments(layerNames);
  // LHBNC has a segment per head.
  const headEach =
    config.layout === "LHBNC"
      ? new Set(layerNames.filter((name, at) => name !== names[at]))
      : undefined;
  const geometry: RankGeometry = {
    ...rank,
    dcpSize: rank.dcpSize ?? 1,
    kernelBlockSize: config.blockSize / config.physicalBlocksPerLogical,
    physicalBlocksPerLogical: config.physicalBlocksPerLogical,
    layout: config.layout,
    attentionBackend: config.attentionBackend,
    deviceId,
    regions: regions.map((region, index) => ({
      name: names[index] ?? region.name,
      baseAddress: region.memory.address + region.offsetBytes,
      numBlocks: region.numBlocks,
      blockLengthBytes: region.blockLengthBytes,
      blockStrideBytes: region.blockStrideBytes,
      groupId: region.groupId,
      memoryType: region.memoryType,
      ...defined({
        deviceId: region.memory.deviceId === deviceId ? undefined : region.memory.deviceId,
        groupIds: region.groupIds,
        numKvHeads:
          region.numKvHeads ?? (headEach?.has(region.name) === true ? rank.tpSize : undefined),
        replicated: region.replicated,
        cellBytes: region.cellBytes,
      }),
    })),
    ...stateOf(config),
    ...(config.groups.some(({ blockSize }) => blockSize !== undefined)
      ? { groupBlockTokens: groupBlockTokens(config) }
      : {}),
  };
  return withCellBytes(geometry, modelGeometry(config), config);
}

function stateOf({ stateSpace }: KvCaches["config"]): Pick<RankGeometry, "stateSpace"> {
  if (stateSpace === undefined) return {};
  const { convProjectionBytes, recurrentBytes } = stateSpace;
  const convBytes = convProjectionBytes.reduce((sum, bytes) => sum + bytes, 0);
  return { stateSpace: { convProjectionBytes, convBytes, recurrentBytes } };
}

export function modelGeometry({
  groups,
  numKvHeads,
  cacheDtype,
}: KvCaches["config"]): ModelGeometry {
  return {
    numKvHeads,
    cacheDtype,
    groups: groups.map(({ kind }) => kind),
    ...(groups.some((group) => group.numKvHeads !== undefined)
      ? { groupKvHeads: groups.map((group) => group.numKvHeads ?? numKvHeads) }
      : {}),
  };
}

/** Sends all of vLLM 0.33's fields, even those with defaults. */
export function describeRank(
  local: RankGeometry,
  { engineId, agentMetadata }: { engineId: string; agentMetadata: Uint8Array },
): AgentMetadata {
  const { regions } = local;
  return {
    engineId,
    agentMetadata,
    baseAddresses: regions.map(({ baseAddress }) => baseAddress),
    deviceId: local.deviceId,
    numBlocks: regions[0]?.numBlocks ?? 0,
    blockLengthsBytes: regions.map(({ blockLengthBytes }) => blockLengthBytes),
    blockStridesBytes: regions.map(({ blockStrideBytes }) => blockStrideBytes),
    kvCacheLayout: local.layout,
    blockSize: local.kernelBlockSize,
    ssmSizes: [local.stateSpace?.convBytes ?? 0, local.stateSpace?.recurrentBytes ?? 0],
    attentionBackend: local.attentionBackend,
    physicalBlocksPerLogical: local.physicalBlocksPerLogical,
    regionNumBlocks: regions.map(({ numBlocks }) => numBlocks),
    regionGroupIds: regions.map(({ groupId }) => groupId),
    regionNames: cachesOfSegments(regions.map(({ name }) => name)),
    regionMemoryTypes: regions.map(({ memoryType }) => memoryType),
    dcpSize: local.dcpSize ?? 1,
    pcpSize: 1,
    pleBlockLengthBytes: null,
    regionMembers: [],
    packedMemberLayouts: {},
    rest: {},
  };
}

/**
 * The same memory in blocks of another size (`push_announced_block_size`). A D that is written to
 * uses only the block size.
 */
export function announcedInBlocksOf(metadata: AgentMetadata, tokens: number): AgentMetadata {
  const { blockSize, numBlocks, blockLengthsBytes, blockStridesBytes, regionNumBlocks } = metadata;
  const lengths = (bytes: readonly number[]) =>
    bytes.map((each) => Math.round((each * tokens) / blockSize));
  const blocks = (count: number) => Math.max(1, Math.floor((count * blockSize) / tokens));
  return {
    ...metadata,
    blockSize: tokens,
    numBlocks: blocks(numBlocks),
    blockLengthsBytes: lengths(blockLengthsBytes),
    blockStridesBytes: lengths(blockStridesBytes),
    regionNumBlocks: regionNumBlocks?.map(blocks),
  };
}

/**
 * A remote rank's geometry, not yet checked against the local one. As in vLLM, the local rank's
 * regions supply what an older peer leaves out; a pipeline stage must name its regions. Prefill
 * context parallelism changes nothing for a reader.
 */
export function remoteGeometry(
  received: AgentMetadata,
  rank: RankPlace,
  local: RankGeometry,
  model = "this model",
): RankGeometry {
  const metadata = (local.ppSize ?? 1) > 1 ? ofLocalStage(received, local) : received;
  const { pcpSize, dcpSize } = metadata;
  if (pcpSize > 1 && dcpSize !== 1 && dcpSize !== pcpSize) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `engine ${metadata.engineId} has prefill context parallelism of ${pcpSize} and decode context parallelism of ${dcpSize}: the second must be 1 or the same`,
      {
        hint: "as in vLLM 0.33; change --decode-context-parallel-size",
        details: { pcpSize, dcpSize },
      },
    );
  }
  if (metadata.pleBlockLengthBytes !== null) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${model}: engine ${metadata.engineId} has a state that is replicated on every rank, in pages of ${metadata.pleBlockLengthBytes} bytes (ple_block_len): this kind of cache is not supported`,
      {
        hint: "serve models with compressed sparse attention and linear layers without KV transfer",
        details: { engineId: metadata.engineId, pleBlockLengthBytes: metadata.pleBlockLengthBytes },
      },
    );
  }
  const { ppRank = 0, ppSize = 1 } = rank;
  if (ppSize > 1 && metadata.regionNames === undefined) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `stage ${ppRank} of engine ${metadata.engineId} does not name its ${metadata.baseAddresses.length} regions: their layers are unknown`,
      { hint: "upgrade the peer to vLLM 0.32 or later", details: { ppRank, ppSize } },
    );
  }
  const packed = Object.entries(metadata.packedMemberLayouts).map(
    ([name, [offsetBytes, lengthBytes]]) => {
      return [name, { offsetBytes: offsetBytes ?? 0, lengthBytes: lengthBytes ?? 0 }] as const;
    },
  );
  const [convBytes = 0, recurrentBytes = 0] = metadata.ssmSizes;
  const names =
    metadata.regionNames === undefined ? undefined : numberSegments(metadata.regionNames);
  const members = numberMembers(metadata.regionMembers);
  // All layers of this stage may belong to one group.
  const hasOtherGroups = (local.ppSize ?? 1) > 1 && new Set(received.regionGroupIds).size > 1;
  const mixed = new Set(metadata.regionMemoryTypes ?? []).size > 1;
  const remote: RankGeometry = {
    ...rank,
    ...(packed.length === 0 ? {} : { packedMembers: Object.fromEntries(packed) }),
    ...(convBytes + recurrentBytes === 0 ? {} : { stateSpace: { convBytes, recurrentBytes } }),
    dcpSize: metadata.dcpSize,
    kernelBlockSize: metadata.blockSize,
    physicalBlocksPerLogical: metadata.physicalBlocksPerLogical,
    layout: metadata.kvCacheLayout,
    attentionBackend: metadata.attentionBackend,
    deviceId: metadata.deviceId,
    regions: metadata.baseAddresses.map((baseAddress, index): RegionGeometry => {
      const received = names?.[index];
      const here =
        ppSize > 1 ? local.regions.find(({ name }) => name === received) : local.regions[index];
      const blockLengthBytes = metadata.blockLengthsBytes[index] ?? 0;
      const groupId = metadata.regionGroupIds?.[index] ?? here?.groupId ?? 0;
      return {
        name: received ?? here?.name ?? `region ${index}`,
        baseAddress,
        numBlocks: metadata.regionNumBlocks?.[index] ?? metadata.numBlocks,
        blockLengthBytes,
        blockStrideBytes: metadata.blockStridesBytes[index] ?? blockLengthBytes,
        groupId,
        ...(hasOtherGroups && groupId >= 0 ? { groupIds: [groupId] } : {}),
        memoryType: metadata.regionMemoryTypes?.[index] ?? here?.memoryType ?? "DRAM",
        // As vLLM 0.33's `register_local_xfer_handler`.
        ...(mixed && metadata.regionMemoryTypes?.[index] === "DRAM" ? { deviceId: 0 } : {}),
        ...(received === undefined || here?.name === received ? sharingOf(here) : {}),
        ...(members[index] === undefined ? {} : { members: members[index] }),
      };
    }),
  };
  return { ...remote, ...blockTokensOf(remote, local) };
}

/**
 * D's regions of the layers that this stage of a push P writes (vLLM 0.33 matches by index, or by
 * name in groups).
 */
function ofLocalStage(metadata: AgentMetadata, local: RankGeometry): AgentMetadata {
  const { engineId, regionNames } = metadata;
  const stage = `stage ${local.ppRank} of this engine`;
  const found: [what: string, isFound: boolean][] = [
    ["recurrent states", local.stateSpace !== undefined],
    ["rows with several layers", Object.keys(metadata.packedMemberLayouts).length > 0],
    // D plans for all regions and this stage for some, so the two may choose different forms.
    ["regions in host and in device memory", new Set(metadata.regionMemoryTypes ?? []).size > 1],
  ];
  for (const [what, isFound] of found) {
    if (!isFound) continue;
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${stage} has some of the layers of engine ${engineId}, and the cache has ${what}: push with pipeline stages does not support that`,
      { hint: "use pipeline_parallel_size 1 on both sides, or pull" },
    );
  }
  const theirs = regionNames === undefined ? [] : numberSegments(regionNames);
  const indices = local.regions.map(({ name }) => theirs.indexOf(name));
  const absent = local.regions.filter((_, at) => (indices[at] ?? -1) < 0).map(({ name }) => name);
  if (absent.length > 0) {
    throw new KvError(
      "KV_PLAN_INCOMPATIBLE",
      `engine ${engineId} ${regionNames === undefined ? "does not name its regions" : `has no region ${absent.join(", ")}`}: ${stage} does not know where to write its layers`,
      { hint: "run the same model on both sides, and vLLM 0.32 or later", details: { absent } },
    );
  }
  const of = <T>(values: readonly T[]) =>
    indices.flatMap((index) => values.slice(index, index + 1));
  const optional = <T>(values: readonly T[] | undefined) => values && of(values);
  return {
    ...metadata,
    baseAddresses: of(metadata.baseAddresses),
    blockLengthsBytes: of(metadata.blockLengthsBytes),
    blockStridesBytes: of(metadata.blockStridesBytes),
    regionNumBlocks: optional(metadata.regionNumBlocks),
    regionGroupIds: optional(metadata.regionGroupIds),
    regionMemoryTypes: optional(metadata.regionMemoryTypes),
    regionNames: optional(regionNames),
    regionMembers: of(metadata.regionMembers),
  };
}

/**
 * The handshake omits them, but the model fixes the ratio of two groups. Undefined where the remote
 * groups its layers differently, or a group would get part of a token.
 */
function blockTokensOf(
  remote: RankGeometry,
  local: RankGeometry,
): Pick<RankGeometry, "groupBlockTokens"> {
  if (local.groupBlockTokens === undefined) return {};
  const groups = new Map(local.regions.map(({ name, groupId }) => [name, groupId]));
  if (remote.regions.some(({ name, groupId }) => groups.get(name) !== groupId)) return {};
  const logical = (rank: RankGeometry) => rank.kernelBlockSize * rank.physicalBlocksPerLogical;
  const groupBlockTokens = local.groupBlockTokens.map(
    (tokens) => (tokens * logical(remote)) / logical(local),
  );
  return groupBlockTokens.every(Number.isInteger) ? { groupBlockTokens } : {};
}

/** The model decides it, not the handshake. */
function sharingOf(
  here: RegionGeometry | undefined,
): Pick<RegionGeometry, "cellBytes" | "numKvHeads" | "replicated"> {
  return defined({
    numKvHeads: here?.numKvHeads,
    replicated: here?.replicated,
    cellBytes: here?.cellBytes,
  });
}

function defined<T extends object>(given: T): { [K in keyof T]?: Exclude<T[K], undefined> } {
  const entries = Object.entries(given).filter(([, value]) => value !== undefined);
  return Object.fromEntries(entries) as { [K in keyof T]?: Exclude<T[K], undefined> };
}

function numberMembers(members: readonly (readonly string[])[]): (readonly string[])[] {
  const numbered = numberSegments(members.flat());
  let begin = 0;
  return members.map(({ length }) => {
    begin += length;
    return numbered.slice(begin - length, begin);
  });
}

const MARK = " #";

/**
 * vLLM registers every segment of a cache (a head in LHBNC; K and V) under the cache's name. Plans
 * need unique names: "name #2", and so on.
 */
export function numberSegments(names: readonly string[]): string[] {
  const seen = new Map<string, number>();
  return names.map((name) => {
    const number = (seen.get(name) ?? 0) + 1;
    seen.set(name, number);
    return number === 1 ? name : `${name}${MARK}${number}`;
  });
}

/** Removes a number only after the cache's first segment. */
export function cachesOfSegments(names: readonly string[]): string[] {
  const known = new Set(names);
  return names.map((name) => {
    const cache = name.slice(0, Math.max(0, name.lastIndexOf(MARK)));
    const number = name.slice(cache.length + MARK.length);
    return known.has(cache) && /^[1-9]\d*$/.test(number) ? cache : name;
  });
}
