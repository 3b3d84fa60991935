import { type BlockIds, type KvCacheKind, KvError } from "@kv/interface";

/** A region that holds blocks of several groups. */
const SHARED_REGION = -1;

/** All ids for the first offset, then all for the next. */
type IdPart = readonly [ids: readonly number[], offsets: readonly number[]];

interface StateSpace {
  readonly convProjections: number;
  readonly regions?: readonly number[] | undefined;
}

/** All attention regions come before all state-space regions. */
interface DescriptorIdOptions {
  readonly groups: readonly KvCacheKind[];
  /** Kernel blocks; of state-space groups logical ones. */
  readonly blockIds: BlockIds;
  readonly numRegions: number;
  /** Of each region, unless `regionNumBlocks` is given. */
  readonly numBlocks: number;
  readonly regionNumBlocks?: readonly number[] | undefined;
  /** -1 for a region that several groups share. */
  readonly regionGroupIds?: readonly number[] | undefined;
  /** Default: whether the regions name more than one group. */
  readonly usesRegionGroupMapping?: boolean | undefined;
  /** Parts into which each attention block is cut. */
  readonly blockSizeRatio?: number | undefined;
  readonly physicalBlocksPerLogical?: number | undefined;
  /** By layer instead of by region: the group of each layer. */
  readonly transferLayerGroupIds?: readonly number[] | undefined;
  /** Convolution projections per layer, and the regions that hold state (all by default). */
  readonly stateSpace?: StateSpace | undefined;
  /** Regions that hold circular scratch. */
  readonly scratchRegions?: readonly number[] | undefined;
}

/**
 * vLLM 0.33's `_compute_desc_ids`: by region and block when groups share all regions, else group by
 * group.
 */
export function computeDescriptorIds(options: DescriptorIdOptions): Int32Array {
  const { numBlocks, physicalBlocksPerLogical = 1 } = options;
  if (numBlocks % physicalBlocksPerLogical !== 0)
    throw invalid(
      `${numBlocks} kernel blocks do not divide into logical blocks of ${physicalBlocksPerLogical}`,
    );
  requireBlocksInside(options);
  const ids: number[] = [];
  for (const [blockIds, offsets] of partsOf(options))
    for (const offset of offsets) for (const id of blockIds) ids.push(offset + id);
  return Int32Array.from(ids);
}

function partsOf(options: DescriptorIdOptions): readonly IdPart[] {
  const layers = options.transferLayerGroupIds ?? [];
  const numRegions =
    options.regionNumBlocks?.length ?? (layers.length > 0 ? layers.length : options.numRegions);
  if (layers.length > 0)
    requireEqual("regions with a block count", numRegions, "layers", layers.length);
  const offsets = startsOf(options, numRegions);
  if (layers.length > 0) {
    return layers.map((group, index) => [groupIds(options, group), [offsets[index] ?? 0]] as const);
  }
  if (options.groups.includes("mamba"))
    return hybridIds(options, startsOf(options, numRegions + 1)[numRegions] as number);

  const regionGroups = options.regionGroupIds ?? (numRegions === 1 ? [0] : []);
  requireEqual(
    "regions with a group",
    regionGroups.length,
    "regions with a block count",
    numRegions,
  );
  const mapped =
    options.usesRegionGroupMapping ?? regionGroups.some((group) => group !== regionGroups[0]);
  if (!mapped) return [[options.blockIds.flat(), offsets]];
  return options.blockIds.map((ids, group) => {
    const own = offsets.filter((_, region) => {
      return regionGroups[region] === group || regionGroups[region] === SHARED_REGION;
    });
    if (own.length === 0 && ids.length > 0)
      throw invalid(`group ${group} has ${ids.length} blocks and no region to hold them`);
    return [ids, own];
  });
}

/** The descriptor of a block beyond the region would be one of the next region. */
function requireBlocksInside(options: DescriptorIdOptions): void {
  const most = scaled(options, Math.max(options.numBlocks, ...(options.regionNumBlocks ?? [])));
  const outside = options.blockIds.flat().find((id) => id < 0 || id >= most);
  if (outside !== undefined) throw invalid(`block ${outside} is not one of ${most} blocks`);
}

function hybridIds(options: DescriptorIdOptions, firstState: number): readonly IdPart[] {
  const { stateSpace, groups, numRegions } = options;
  const numBlocks = scaled(options, options.numBlocks);
  if (stateSpace === undefined)
    throw invalid("a state-space group needs the number of its convolution projections");
  const regionsOfState =
    stateSpace.regions !== undefined && stateSpace.regions.length > 0
      ? stateSpace.regions.length
      : numRegions;
  // Each layer's state is its convolution, one piece per projection, and the recurrent state.
  const stateRegions = regionsOfState * (stateSpace.convProjections + 1);
  const logicalBlocks = options.numBlocks / (options.physicalBlocksPerLogical ?? 1);
  const attention = Array.from({ length: numRegions }, (_, region) => region * numBlocks);
  const state = Array.from(
    { length: stateRegions },
    (_, region) => firstState + region * logicalBlocks,
  );
  const scratch = (options.scratchRegions ?? []).map((region) => region * numBlocks);
  const startsOfKind = new Map([
    ["mamba", state],
    ["circular", scratch],
  ]);
  return options.blockIds.map(
    (ids, group) => [ids, startsOfKind.get(groups[group] ?? "") ?? attention] as const,
  );
}

function startsOf(options: DescriptorIdOptions, numRegions: number): number[] {
  let next = 0;
  return Array.from({ length: numRegions }, (_, region) => {
    const start = next;
    next += scaled(options, options.regionNumBlocks?.[region] ?? options.numBlocks);
    return start;
  });
}

function scaled({ blockSizeRatio = 1 }: DescriptorIdOptions, numBlocks: number): number {
  return Math.floor(numBlocks * blockSizeRatio);
}

function groupIds(options: DescriptorIdOptions, group: number): readonly number[] {
  const ids = options.blockIds[group];
  if (ids !== undefined) return ids;
  throw invalid(`a layer names group ${group} of ${options.blockIds.length}`);
}

function requireEqual(whatOne: string, one: number, whatOther: string, other: number): void {
  if (one !== other) throw invalid(`${one} ${whatOne}, but ${other} ${whatOther}`);
}

const invalid = (message: string) => new KvError("KV_PLAN_INVALID", message);
