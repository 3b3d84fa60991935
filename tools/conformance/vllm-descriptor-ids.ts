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
export interface DescriptorIdOptions {
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
  requireWholeBlocks(options);
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
  if (!mapped) return [[joined(options.blockIds), offsets]];
  return options.blockIds.map((ids, group) => {
    const own = offsets.filter((_, region) => {
      return regionGroups[region] === group || regionGroups[region] === SHARED_REGION;
    });
    if (own.length === 0 && ids.length > 0) {
      throw new KvError(
        "KV_PLAN_INVALID",
        `group ${group} has ${ids.length} blocks and no region to hold them`,
        { details: { group, regionGroups } },
      );
    }
    return [ids, own];
  });
}

function requireWholeBlocks({
  numBlocks,
  physicalBlocksPerLogical = 1,
}: DescriptorIdOptions): void {
  if (numBlocks % physicalBlocksPerLogical === 0) return;
  throw new KvError(
    "KV_PLAN_INVALID",
    `${numBlocks} kernel blocks do not divide into logical blocks of ${physicalBlocksPerLogical}`,
    { details: { numBlocks, physicalBlocksPerLogical } },
  );
}

/** The descriptor of a block beyond the region would be one of the next region. */
function requireBlocksInside(options: DescriptorIdOptions): void {
  const most = scaled(options, Math.max(options.numBlocks, ...(options.regionNumBlocks ?? [])));
  const outside = options.blockIds.flat().find((id) => id < 0 || id >= most);
  if (outside === undefined) return;
  throw new KvError("KV_PLAN_INVALID", `block ${outside} is not one of ${most} blocks`, {
    details: { block: outside, numBlocks: most },
  });
}

function hybridIds(options: DescriptorIdOptions, firstState: number): readonly IdPart[] {
  const { stateSpace, groups, numRegions } = options;
  const numBlocks = scaled(options, options.numBlocks);
  if (stateSpace === undefined) {
    throw new KvError(
      "KV_PLAN_INVALID",
      "a state-space group needs the number of its convolution projections, none given",
    );
  }
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

function joined(blockIds: BlockIds): readonly number[] {
  return blockIds.length === 1 ? (blockIds[0] as readonly number[]) : blockIds.flat();
}

function startsOf(options: DescriptorIdOptions, numRegions: number): number[] {
  const starts = new Array<number>(numRegions);
  let next = 0;
  for (let region = 0; region < numRegions; region++) {
    starts[region] = next;
    next += scaled(options, options.regionNumBlocks?.[region] ?? options.numBlocks);
  }
  return starts;
}

function scaled({ blockSizeRatio = 1 }: DescriptorIdOptions, numBlocks: number): number {
  return Math.floor(numBlocks * blockSizeRatio);
}

function groupIds(options: DescriptorIdOptions, group: number): readonly number[] {
  const ids = options.blockIds[group];
  if (ids !== undefined) return ids;
  throw new KvError(
    "KV_PLAN_INVALID",
    `a layer names group ${group}, block ids are given for ${options.blockIds.length} groups`,
  );
}

function requireEqual(whatOne: string, one: number, whatOther: string, other: number): void {
  if (one === other) return;
  throw new KvError("KV_PLAN_INVALID", `${one} ${whatOne}, but ${other} ${whatOther}`, {
    details: { [whatOne]: one, [whatOther]: other },
  });
}
