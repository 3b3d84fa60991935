import { KV_CACHE_LAYOUTS, type KvError } from "@kv/interface";
import { invalidPlan } from "../errors.js";
import { cacheKindNames } from "../kinds/registry.js";
import {
  type ModelGeometry,
  type RankGeometry,
  type RegionGeometry,
  SHARED_REGION,
} from "./rank-geometry.js";

/** Descriptor ids are signed 32-bit integers. */
export const MAX_DESCRIPTORS = 2 ** 31 - 1;
const MAX_REGIONS = 65_536;

/**
 * `side` is the subject of messages, such as "remote rank 2".
 *
 * @throws `KV_PLAN_INVALID` with the field and its value where a rank contradicts itself.
 */
export function checkRankGeometry(side: string, rank: RankGeometry, model: ModelGeometry): void {
  const { tpSize, tpRank, dcpSize, ppRank, ppSize, deviceId, layout, regions } = rank;
  const { kernelBlockSize, physicalBlocksPerLogical, groupBlockTokens, stateSpace } = rank;
  integers(side, 1, { tpSize, dcpSize, kernelBlockSize, physicalBlocksPerLogical, ppSize });
  integers(side, 0, { tpRank, deviceId, ppRank });
  if (tpRank >= tpSize) throw invalid(side, `tpRank ${tpRank} is not below tpSize ${tpSize}`);
  if (!KV_CACHE_LAYOUTS.includes(layout))
    throw invalid(side, `layout "${layout}" is not one of ${KV_CACHE_LAYOUTS.join(", ")}`);
  if (regions.length === 0 || regions.length > MAX_REGIONS)
    throw invalid(side, `${regions.length} regions, expected 1 to ${MAX_REGIONS}`);
  byGroup(side, { groupBlockTokens }, model);
  if (stateSpace !== undefined) {
    const { convBytes, recurrentBytes, convProjectionBytes = [] } = stateSpace;
    const sums = { "stateSpace.convBytes": convBytes, "stateSpace.recurrentBytes": recurrentBytes };
    integers(side, 0, sums);
    for (const bytes of convProjectionBytes) integers(side, 1, { convProjectionBytes: bytes });
  }
  const names = new Set<string>();
  let descriptors = 0;
  for (const [index, region] of regions.entries()) {
    if (names.has(region.name)) throw invalid(side, `two regions are named "${region.name}"`);
    names.add(region.name);
    checkRegion(`${side}, region ${index} "${region.name}"`, region, rank, model.groups.length);
    descriptors += region.numBlocks;
  }
  if (descriptors > MAX_DESCRIPTORS)
    throw invalid(
      side,
      `${descriptors} blocks over all regions, at most ${MAX_DESCRIPTORS} can be indexed`,
    );
}

/** @throws `KV_PLAN_INVALID` for no KV cache group, an unknown kind or a number out of range. */
export function checkModelGeometry(model: ModelGeometry): void {
  const { numKvHeads, groups, groupKvHeads } = model;
  integers("the model", 1, { numKvHeads });
  if (groups.length === 0) throw invalid("the model", "no KV cache group");
  for (const [index, kind] of groups.entries()) {
    if (!cacheKindNames().includes(kind))
      throw invalid(
        "the model",
        `group ${index}: kind "${kind}" is none of ${cacheKindNames().join(", ")}`,
      );
  }
  byGroup("the model", { groupKvHeads }, model);
}

function checkRegion(
  where: string,
  region: RegionGeometry,
  { physicalBlocksPerLogical: ratio }: RankGeometry,
  numGroups: number,
): void {
  const { baseAddress, numBlocks, blockLengthBytes, blockStrideBytes, groupId } = region;
  const { numKvHeads, cellBytes, deviceId, groupIds = [] } = region;
  integers(where, 1, { numBlocks, blockLengthBytes, blockStrideBytes, numKvHeads, cellBytes });
  integers(where, 0, { baseAddress, deviceId });
  integers(where, SHARED_REGION, { groupId });
  if (blockStrideBytes < blockLengthBytes) {
    throw invalid(
      where,
      `blocks of ${blockLengthBytes} bytes overlap at a stride of ${blockStrideBytes} bytes`,
    );
  }
  for (const group of groupIds) {
    integers(where, 0, { groupIds: group });
    if (group >= numGroups)
      throw invalid(where, `groupIds name ${group}, the model has ${numGroups} groups`);
  }
  if (groupId >= numGroups)
    throw invalid(where, `groupId ${groupId}, but the model has ${numGroups} KV cache groups`);
  const end = baseAddress + (numBlocks - 1) * blockStrideBytes + blockLengthBytes;
  if (!Number.isSafeInteger(end)) {
    throw invalid(
      where,
      `it ends at ${end}, beyond the addresses that a number holds exactly (2^53)`,
    );
  }
  // Rounding down would hide blocks, and shift the ids of those after it.
  if (numBlocks % ratio !== 0) {
    throw invalid(
      where,
      `${numBlocks} kernel blocks do not divide into logical blocks of ${ratio} kernel blocks`,
    );
  }
}

function byGroup(
  side: string,
  given: Readonly<Record<string, readonly number[] | undefined>>,
  { groups }: ModelGeometry,
): void {
  for (const [field, list] of Object.entries(given)) {
    if (list === undefined) continue;
    for (const value of list) integers(side, 1, { [field]: value });
    if (list.length !== groups.length) {
      throw invalid(
        side,
        `${field} has ${list.length} entries for ${groups.length} KV cache groups`,
      );
    }
  }
}

function integers(
  where: string,
  minimum: number,
  fields: Readonly<Record<string, number | undefined>>,
): void {
  for (const [field, value] of Object.entries(fields)) {
    if (value === undefined || (Number.isSafeInteger(value) && value >= minimum)) continue;
    throw invalid(where, `${field} is ${value}, expected an integer of at least ${minimum}`);
  }
}

function invalid(where: string, what: string): KvError {
  return invalidPlan(`${where}: ${what}`, { where, what });
}
