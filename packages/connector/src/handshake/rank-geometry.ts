import { type KvCaches, KvError } from "@kv/interface";
import {
  groupBlockTokens,
  type ModelGeometry,
  type RankGeometry,
  type RegionGeometry,
  requireStatesFit,
  withCellBytes,
} from "@kv/plan";
import type { AgentMetadata } from "@kv/protocol";

/**
 * The position of a rank in its engine. The pipeline fields are set only for an engine with several
 * stages.
 */
export type RankPlace = Pick<RankGeometry, "tpRank" | "tpSize" | "ppRank" | "ppSize" | "dcpSize">;

/** This rank's caches in the form that plans use. */
export function localGeometry(caches: KvCaches, rank: RankPlace): RankGeometry {
  const { config, regions } = caches;
  const [first] = regions;
  if (first === undefined)
    throw new KvError("KV_PLAN_INVALID", "a KV cache without a region cannot be registered");
  const layerNames = regions.map(({ name }) => name);
  const names = numberSegments(layerNames);
  // LHBNC has a segment for each head of a rank.
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
    deviceId: first.memory.deviceId,
    regions: regions.map((region, index) => ({
      name: names[index] ?? region.name,
      baseAddress: region.memory.address + region.offsetBytes,
      numBlocks: region.numBlocks,
      blockLengthBytes: region.blockLengthBytes,
      blockStrideBytes: region.blockStrideBytes,
      groupId: region.groupId,
      memoryType: region.memoryType,
      ...(region.memory.deviceId === first.memory.deviceId
        ? {}
        : { deviceId: region.memory.deviceId }),
      ...(region.groupIds === undefined ? {} : { groupIds: region.groupIds }),
      ...(headEach?.has(region.name) === true ? { numKvHeads: rank.tpSize } : {}),
      ...(region.numKvHeads === undefined ? {} : { numKvHeads: region.numKvHeads }),
      ...(region.replicated === undefined ? {} : { replicated: region.replicated }),
      ...(region.cellBytes === undefined ? {} : { cellBytes: region.cellBytes }),
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

/** The groups of a model in the form that plans use. */
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

/**
 * A rank's geometry as handshake metadata: all of vLLM 0.33's fields, including those with
 * defaults.
 */
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
 * The same memory in blocks of another size, as a push P announces it to vLLM D's
 * (`push_announced_block_size`). A D that is written to uses none of it but the block size. Where
 * P's blocks do not fill whole announced ones, the rest of the memory is left out.
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
 * A remote rank's geometry from its handshake metadata. The plan checks it against the local one.
 * Fields that an older peer leaves out are taken from the local rank, region by region, as in vLLM.
 * A pipeline stage has only the regions of its own layers, so it must name them. Prefill context
 * parallelism changes nothing for a reader: its first rank serves whole blocks, or its ranks are
 * those of decode context parallelism. `model` names the model in errors.
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
  // The layers of this stage may all be of one group: only the whole list shows that other groups
  // have regions of their own.
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
        // Beside device memory, host memory is registered as device 0 (vLLM 0.33,
        // `register_local_xfer_handler`).
        ...(mixed && metadata.regionMemoryTypes?.[index] === "DRAM" ? { deviceId: 0 } : {}),
        ...(received === undefined || here?.name === received ? sharingOf(here) : {}),
        ...(members[index] === undefined ? {} : { members: members[index] }),
      };
    }),
  };
  requireStatesFit(`remote rank ${rank.tpRank}`, remote, [...remote.regions.keys()]);
  return { ...remote, ...blockTokensOf(remote, local) };
}

/**
 * The regions of a D that has all layers, which this stage of a push P writes: those of its own
 * layers, in its order (vLLM 0.33 matches by index, or by name in groups).
 */
function ofLocalStage(metadata: AgentMetadata, local: RankGeometry): AgentMetadata {
  const { engineId, regionNames } = metadata;
  const stage = `stage ${local.ppRank} of this engine`;
  const found: [what: string, isFound: boolean][] = [
    ["recurrent states", local.stateSpace !== undefined],
    ["rows with several layers", Object.keys(metadata.packedMemberLayouts).length > 0],
    // D plans for all its regions, this stage for some of them: the two may choose unlike forms.
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
  const optional = <T>(values: readonly T[] | undefined) =>
    values === undefined ? undefined : of(values);
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
 * Tokens in the blocks of the remote's groups, which a handshake does not carry: the ratio of two
 * groups is the model's. Absent where the remote groups its layers otherwise, and where groups
 * would not get whole tokens, which the plan refuses.
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

/**
 * How ranks share a cache, and what a cell is, depends on the model and is not part of the
 * handshake, so it is taken from the local region.
 */
function sharingOf(
  here: RegionGeometry | undefined,
): Pick<RegionGeometry, "cellBytes" | "numKvHeads" | "replicated"> {
  return {
    ...(here?.numKvHeads === undefined ? {} : { numKvHeads: here.numKvHeads }),
    ...(here?.replicated === undefined ? {} : { replicated: here.replicated }),
    ...(here?.cellBytes === undefined ? {} : { cellBytes: here.cellBytes }),
  };
}

/**
 * Numbers the members of regions in the way that region names are numbered: a cache with several
 * segments is a member of as many regions.
 */
function numberMembers(members: readonly (readonly string[])[]): (readonly string[])[] {
  const numbered = numberSegments(members.flat());
  let begin = 0;
  return members.map(({ length }) => {
    begin += length;
    return numbered.slice(begin - length, begin);
  });
}

/** Separates a cache's name from the number of its segment. */
const MARK = " #";

/**
 * vLLM registers a region per segment of a cache whose blocks are not contiguous in memory (one
 * segment per head in LHBNC; separate K and V), all under the cache's name. Plans need unique
 * names: the second segment is "name #2", and so on.
 */
export function numberSegments(names: readonly string[]): string[] {
  const seen = new Map<string, number>();
  return names.map((name) => {
    const number = (seen.get(name) ?? 0) + 1;
    seen.set(name, number);
    return number === 1 ? name : `${name}${MARK}${number}`;
  });
}

/**
 * Maps segment names back to vLLM's names. A number is removed only if the cache's first segment
 * came before it.
 */
export function cachesOfSegments(names: readonly string[]): string[] {
  const known = new Set(names);
  return names.map((name) => {
    const cache = name.slice(0, Math.max(0, name.lastIndexOf(MARK)));
    const number = name.slice(cache.length + MARK.length);
    return known.has(cache) && /^[1-9]\d*$/.test(number) ? cache : name;
  });
}
