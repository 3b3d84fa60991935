import {
  DESCRIPTOR_ROW,
  type DescriptorPairs,
  type DescriptorTable,
  descriptorPairs,
  type KvCacheKind,
  type KvCacheLayout,
  type MemoryType,
} from "@kv/interface";
import type {
  EngineTransferPlan,
  RankGeometry,
  RegionGeometry,
  RequestPlan,
} from "../../src/index.js";

/** A cache of the model, as both engines have it: attention, or state. */
export interface CacheSpec {
  readonly name: string;
  readonly groups: readonly number[];
  /** What its region says. Default: its only group, or -1. */
  readonly groupId?: number;
  /** KV heads of the whole model; undefined: the same on every rank. */
  readonly heads?: number;
  /** Tokens in a logical block; default the engine's. */
  readonly blockTokens?: number;
  /**
   * Or this multiple of the engine's, when layers with fewer heads have blocks of equal size in
   * bytes.
   */
  readonly blockTimes?: number;
  /**
   * Bytes of the whole model's convolution projections and recurrent state; multiples of 4 for each
   * rank.
   */
  readonly state?: { readonly projections: readonly number[]; readonly recurrent: number };
  readonly memoryType?: MemoryType;
  /**
   * Per group: different values of the groups that share the cache. The geometry then has them by
   * group, not by region.
   */
  readonly of?: Readonly<Record<number, Pick<CacheSpec, "heads" | "blockTimes">>>;
}

export interface KindEngine {
  readonly tpSize: number;
  readonly ppSize?: number;
  readonly dcpSize?: number;
  readonly kernelTokens: number;
  readonly perLogical: number;
  /** Default LBHNC. */
  readonly layout?: KvCacheLayout;
  /** Default FLASH_ATTN. */
  readonly attentionBackend?: string;
  readonly logicalBlocks: number;
  readonly padding?: number;
  /** For each stage, the indices of its caches. */
  readonly stages?: readonly (readonly number[])[];
  readonly memoryType?: MemoryType;
  /** Packs all caches into one row per block and advertises the page offsets. */
  readonly packed?: boolean;
}

export interface KindRank {
  readonly geometry: RankGeometry;
  readonly bytes: readonly Uint8Array[];
  readonly caches: readonly CacheSpec[];
}

export const CELL = 4;
const SPACING = 2 ** 26;

const headsHere = (cache: CacheSpec, tpSize: number) =>
  cache.heads === undefined ? 1 : Math.max(1, cache.heads / tpSize);

/** A cache with the values of one of its groups. */
const asGroup = (cache: CacheSpec, group: number): CacheSpec => ({
  ...cache,
  ...cache.of?.[group],
});

/** The first cache of a group, with the group's values. */
export function specOfGroup(caches: readonly CacheSpec[], group: number): CacheSpec | undefined {
  const found = caches.find((cache) => cache.groups.includes(group));
  return found === undefined ? undefined : asGroup(found, group);
}

/** The per-group values of the model geometry, when groups of one cache differ. */
export function groupKvHeadsOf(
  caches: readonly CacheSpec[],
  groups: readonly KvCacheKind[],
): { readonly groupKvHeads?: readonly number[] } {
  if (caches.every((cache) => cache.of === undefined)) return {};
  return { groupKvHeads: groups.map((_, group) => specOfGroup(caches, group)?.heads ?? 1) };
}

/** Tokens in a logical block of a cache. */
export function blockTokensOf(
  cache: CacheSpec | undefined,
  { kernelTokens, perLogical }: Pick<KindEngine, "kernelTokens" | "perLogical">,
): number {
  return cache?.blockTokens ?? kernelTokens * perLogical * (cache?.blockTimes ?? 1);
}

function attentionBytes(cache: CacheSpec, engine: KindEngine): number {
  const tokens = blockTokensOf(cache, engine) / engine.perLogical;
  return headsHere(cache, engine.tpSize) * tokens * CELL;
}

function stateBytes(cache: CacheSpec, tpSize: number): number {
  if (cache.state === undefined) return 0;
  return (
    (cache.state.projections.reduce((sum, one) => sum + one, 0) + cache.state.recurrent) / tpSize
  );
}

/** The ranks of an engine, stage by stage; unused bytes are `filler`. */
export function kindEngine(
  engine: KindEngine,
  specs: readonly CacheSpec[],
  groups: readonly KvCacheKind[],
  base: number,
  filler: number,
): KindRank[] {
  const ranks: KindRank[] = [];
  for (const [ppRank, indices] of (engine.stages ?? [[...specs.keys()]]).entries()) {
    for (let tpRank = 0; tpRank < engine.tpSize; tpRank++) {
      const caches = indices.map((index) => specs[index] as CacheSpec);
      const at = base + (ppRank * engine.tpSize + tpRank) * SPACING * 16;
      const regions = caches.map((cache, index): RegionGeometry => {
        const page = Math.max(
          attentionBytes(cache, engine),
          Math.ceil(stateBytes(cache, engine.tpSize) / engine.perLogical / 4) * 4,
        );
        return {
          name: cache.name,
          baseAddress: at + index * SPACING,
          numBlocks: engine.logicalBlocks * engine.perLogical,
          blockLengthBytes:
            cache.heads === undefined || cache.state === undefined
              ? page
              : attentionBytes(cache, engine),
          blockStrideBytes: page + (engine.padding ?? 0),
          groupId: cache.groupId ?? (cache.groups.length === 1 ? (cache.groups[0] as number) : -1),
          ...(cache.groups.length > 1 && cache.groups.length < groups.length
            ? { groupIds: cache.groups }
            : {}),
          ...(cache.heads === undefined
            ? { replicated: true }
            : cache.of === undefined
              ? { numKvHeads: cache.heads }
              : {}),
          memoryType: cache.memoryType ?? engine.memoryType ?? "DRAM",
        };
      });
      const states = caches.find(({ state }) => state !== undefined)?.state;
      const share = (bytes: number) => bytes / engine.tpSize;
      const rank: RankGeometry = {
        tpRank,
        tpSize: engine.tpSize,
        ppRank,
        ppSize: engine.stages?.length ?? 1,
        dcpSize: engine.dcpSize ?? 1,
        kernelBlockSize: engine.kernelTokens,
        physicalBlocksPerLogical: engine.perLogical,
        layout: engine.layout ?? "LBHNC",
        attentionBackend: engine.attentionBackend ?? "FLASH_ATTN",
        deviceId: 0,
        regions,
        ...(groups.some((_, group) => {
          const spec = specOfGroup(specs, group);
          return spec?.blockTokens !== undefined || spec?.blockTimes !== undefined;
        })
          ? {
              groupBlockTokens: groups.map((_, group) =>
                blockTokensOf(specOfGroup(specs, group), engine),
              ),
            }
          : {}),
        ...(states === undefined
          ? {}
          : {
              stateSpace: {
                convProjectionBytes: states.projections.map(share),
                convBytes: share(states.projections.reduce((sum, one) => sum + one, 0)),
                recurrentBytes: share(states.recurrent),
              },
            }),
      };
      const bytes = regions.map((region) =>
        new Uint8Array(region.numBlocks * region.blockStrideBytes).fill(filler),
      );
      ranks.push(
        engine.packed
          ? packRows({ geometry: rank, bytes, caches }, filler)
          : { geometry: rank, bytes, caches },
      );
    }
  }
  return ranks;
}

/** The same caches as pages of one row per block. Each region is a view of the row. */
function packRows({ geometry, caches }: KindRank, filler: number): KindRank {
  const [first] = geometry.regions as [RegionGeometry];
  let rowBytes = 0;
  const members: Record<string, { offsetBytes: number; lengthBytes: number }> = {};
  for (const region of geometry.regions) {
    members[region.name] = { offsetBytes: rowBytes, lengthBytes: region.blockLengthBytes };
    rowBytes += region.blockLengthBytes;
  }
  const row: RegionGeometry = {
    ...first,
    blockLengthBytes: rowBytes,
    blockStrideBytes: rowBytes,
    groupId: new Set(geometry.regions.map(({ groupId }) => groupId)).size > 1 ? -1 : first.groupId,
  };
  const whole = new Uint8Array(row.numBlocks * rowBytes).fill(filler);
  return {
    geometry: { ...geometry, regions: [row], packedMembers: members },
    bytes: [whole],
    caches,
  };
}

export interface KindRequest {
  readonly numTokens: number;
  /** Logical block tables of the whole sequence, per group, before DCP splits them. */
  readonly tables: readonly (readonly number[])[];
  /** First stored token of each group: the start of a window. */
  readonly fromToken?: readonly number[];
}

/** Every cell that a rank should hold for the request: `visit(bytes, offset, label)`. */
export function eachCell(
  rank: KindRank,
  kinds: readonly KvCacheKind[],
  request: KindRequest,
  visit: (bytes: Uint8Array, offset: number, label: number) => void,
): void {
  const { geometry } = rank;
  const dcpSize = geometry.dcpSize ?? 1;
  for (const [index, cache] of rank.caches.entries()) {
    const member = geometry.packedMembers?.[cache.name];
    const region = (
      member === undefined ? geometry.regions[index] : geometry.regions[0]
    ) as RegionGeometry;
    const bytes = (member === undefined ? rank.bytes[index] : rank.bytes[0]) as Uint8Array;
    const inRow = member?.offsetBytes ?? 0;
    for (const group of cache.groups) {
      const table = request.tables[group] ?? [];
      if (kinds[group] === "mamba") {
        const block = table.at(-1);
        if (block === undefined || cache.state === undefined) continue;
        let offset = block * geometry.physicalBlocksPerLogical * region.blockStrideBytes;
        for (const [part, total] of [...cache.state.projections, cache.state.recurrent].entries()) {
          const mine = total / geometry.tpSize;
          for (let at = 0; at < mine; at += CELL) {
            const position = geometry.tpRank * mine + at;
            visit(bytes, offset + at, labelOf(cache.name, group, 100 + part, position));
          }
          offset += mine;
        }
        continue;
      }
      const own = asGroup(cache, group);
      const logicalTokens = blockTokensOf(own, {
        kernelTokens: geometry.kernelBlockSize,
        perLogical: geometry.physicalBlocksPerLogical,
      });
      const tokens = logicalTokens / geometry.physicalBlocksPerLogical;
      const tokenMajor = geometry.layout.endsWith("NHC");
      const heads = headsHere(own, geometry.tpSize);
      const firstHead =
        own.heads === undefined ? 0 : Math.floor((geometry.tpRank * own.heads) / geometry.tpSize);
      const cellBytes = cache.of === undefined ? CELL : region.blockLengthBytes / (heads * tokens);
      for (let token = request.fromToken?.[group] ?? 0; token < request.numTokens; token++) {
        const position = Math.floor(token / logicalTokens);
        if (position % dcpSize !== geometry.tpRank % dcpSize) continue;
        const listed = Math.floor(position / dcpSize);
        // A circular buffer begins again behind its last block.
        const logical = table[
          kinds[group] === "circular" ? listed % table.length : listed
        ] as number;
        const within = token % logicalTokens;
        const block = logical * geometry.physicalBlocksPerLogical + Math.floor(within / tokens);
        for (let head = 0; head < heads; head++) {
          const at = within % tokens;
          const cell = (tokenMajor ? at * heads + head : head * tokens + at) * cellBytes;
          for (let inCell = 0; inCell < cellBytes; inCell += CELL) {
            visit(
              bytes,
              block * region.blockStrideBytes + inRow + cell + inCell,
              labelOf(cache.name, group, firstHead + head + 4 * inCell, token),
            );
          }
        }
      }
    }
  }
}

/** Different for every cache, group, head and token; never the filler or zero. */
function labelOf(name: string, group: number, head: number, position: number): number {
  const cache = Number(name.replaceAll(/\D/g, ""));
  return 1 + position + 2 ** 14 * (head + 2 ** 8 * (cache + 2 ** 7 * group));
}

export const writeCell = (bytes: Uint8Array, offset: number, label: number) =>
  new DataView(bytes.buffer, bytes.byteOffset).setUint32(offset, label);
export const readCell = (bytes: Uint8Array, offset: number) =>
  new DataView(bytes.buffer, bytes.byteOffset).getUint32(offset);

/**
 * Executes every transfer of a request; returns the bytes that it moved. Writing a byte twice or
 * reading outside the memory is an error.
 */
export function moveAll(
  plan: EngineTransferPlan,
  request: RequestPlan,
  local: KindRank,
  remotes: readonly KindRank[],
): number {
  const written = local.bytes.map((bytes) => new Uint8Array(bytes.length));
  let moved = 0;
  for (const read of request.reads) {
    const list = plan.sources[read.sourceIndex]?.lists[read.listIndex];
    const remote = remotes.find(
      ({ geometry }) =>
        geometry.tpRank === read.remoteRank && (geometry.ppRank ?? 0) === read.remotePpRank,
    );
    if (list === undefined || remote === undefined)
      throw new Error("no such list, or no such rank");
    const [mine, theirs] = [expandTable(list.localTable), expandTable(list.remoteTable)];
    const spelled = ({ localIds, remoteIds }: DescriptorPairs) =>
      [...localIds].map((id, index) => [id, remoteIds[index] as number] as const);
    const pairs = spelled(descriptorPairs(read.descriptors));
    const key = ([one, other]: readonly [number, number]) => `${one}<${other}`;
    const all = (ids: typeof pairs) => ids.map(key).sort().join();
    for (const other of [
      { localIds: read.localIds, remoteIds: read.remoteIds },
      descriptorPairs({ runs: read.runs }),
    ]) {
      if (all(spelled(other)) !== all(pairs)) throw new Error("the spellings of a read differ");
    }
    for (const [localId, remoteId] of pairs) {
      const [here, there] = [mine[localId], theirs[remoteId]];
      if (here === undefined || there === undefined || here.lengthBytes !== there.lengthBytes)
        throw new Error(`descriptors ${localId} and ${remoteId} do not pair`);
      const source = bytesAt(remote, there.address, there.lengthBytes);
      bytesAt(local, here.address, here.lengthBytes).set(source);
      const { region, start } = regionAt(local, here.address);
      const marks = written[region] as Uint8Array;
      for (let at = start; at < start + here.lengthBytes; at++) {
        if (marks[at] === 1) throw new Error(`byte ${at} of region ${region} is written twice`);
        marks[at] = 1;
      }
      moved += here.lengthBytes;
    }
  }
  return moved;
}

function expandTable({ rows }: DescriptorTable): { address: number; lengthBytes: number }[] {
  const expanded: { address: number; lengthBytes: number }[] = [];
  for (let at = 0; at < rows.length; at += DESCRIPTOR_ROW) {
    const [address = 0, lengthBytes = 0, , stride = 0, count = 0] = rows.subarray(at);
    for (let index = 0; index < count; index++)
      expanded.push({ address: address + index * stride, lengthBytes });
  }
  return expanded;
}

function regionAt(
  { geometry, bytes }: KindRank,
  address: number,
): { region: number; start: number } {
  const region = geometry.regions.findIndex(({ baseAddress }, index) => {
    return address >= baseAddress && address < baseAddress + (bytes[index]?.length ?? 0);
  });
  return { region, start: address - (geometry.regions[region]?.baseAddress ?? 0) };
}

function bytesAt(rank: KindRank, address: number, lengthBytes: number): Uint8Array {
  const { region, start } = regionAt(rank, address);
  const found = rank.bytes[region];
  if (found === undefined || start + lengthBytes > found.length)
    throw new Error(
      `${lengthBytes} bytes at ${address} are outside of rank ${rank.geometry.tpRank}`,
    );
  return found.subarray(start, start + lengthBytes);
}
