import { KV_CACHE_LAYOUTS, type KvError } from "@kv/interface";
import { invalidPlan } from "../errors.js";
import { cacheKind } from "../kinds/registry.js";
import {
  type ModelGeometry,
  type RankGeometry,
  type RegionGeometry,
  SHARED_REGION,
} from "./rank-geometry.js";

/** The highest number of descriptors in a list: descriptor ids are signed 32-bit integers. */
export const MAX_DESCRIPTORS = 2 ** 31 - 1;
const MAX_REGIONS = 65_536;

/**
 * Refuses a rank whose description contradicts itself. `side` is the subject of messages, such as
 * "remote rank 2".
 *
 * @throws `KV_PLAN_INVALID` with the field and its value.
 */
export function checkRankGeometry(side: string, rank: RankGeometry, model: ModelGeometry): void {
  integer(side, "tpSize", rank.tpSize, 1);
  integer(side, "tpRank", rank.tpRank, 0);
  if (rank.tpRank >= rank.tpSize)
    throw invalid(side, `tpRank ${rank.tpRank} is not below tpSize ${rank.tpSize}`);
  integer(side, "dcpSize", rank.dcpSize ?? 1, 1);
  integer(side, "kernelBlockSize", rank.kernelBlockSize, 1);
  integer(side, "physicalBlocksPerLogical", rank.physicalBlocksPerLogical, 1);
  integer(side, "deviceId", rank.deviceId, 0);
  if (!KV_CACHE_LAYOUTS.includes(rank.layout)) {
    throw invalid(side, `layout "${rank.layout}" is not one of ${KV_CACHE_LAYOUTS.join(", ")}`);
  }
  if (rank.regions.length === 0 || rank.regions.length > MAX_REGIONS) {
    throw invalid(side, `${rank.regions.length} regions, expected 1 to ${MAX_REGIONS}`);
  }
  integer(side, "ppRank", rank.ppRank ?? 0, 0);
  integer(side, "ppSize", rank.ppSize ?? 1, 1);
  for (const tokens of rank.groupBlockTokens ?? []) integer(side, "groupBlockTokens", tokens, 1);
  requireLength(side, "groupBlockTokens", rank.groupBlockTokens, model.groups.length);
  checkState(side, rank.stateSpace);
  const names = new Set<string>();
  for (const [index, region] of rank.regions.entries()) {
    if (names.has(region.name)) throw invalid(side, `two regions are named "${region.name}"`);
    names.add(region.name);
    checkRegion(side, index, region, model.groups.length);
    requireWholeBlocks(side, index, region, rank);
  }
  const descriptors = rank.regions.reduce((sum, region) => sum + region.numBlocks, 0);
  if (descriptors > MAX_DESCRIPTORS) {
    throw invalid(
      side,
      `${descriptors} blocks over all regions, at most ${MAX_DESCRIPTORS} can be indexed`,
    );
  }
}

/**
 * Refuses a model without KV cache groups, with an unknown kind, or with numbers out of range.
 *
 * @throws `KV_PLAN_INVALID`.
 */
export function checkModelGeometry(model: ModelGeometry): void {
  integer("the model", "numKvHeads", model.numKvHeads, 1);
  if (model.groups.length === 0) throw invalid("the model", "no KV cache group");
  for (const kind of model.groups) cacheKind(kind);
  for (const heads of model.groupKvHeads ?? []) integer("the model", "groupKvHeads", heads, 1);
  requireLength("the model", "groupKvHeads", model.groupKvHeads, model.groups.length);
}

function checkState(side: string, state: RankGeometry["stateSpace"]): void {
  if (state === undefined) return;
  integer(side, "stateSpace.convBytes", state.convBytes, 0);
  integer(side, "stateSpace.recurrentBytes", state.recurrentBytes, 0);
  for (const bytes of state.convProjectionBytes ?? [])
    integer(side, "convProjectionBytes", bytes, 1);
}

function requireLength(
  side: string,
  field: string,
  list: readonly number[] | undefined,
  length: number,
): void {
  if (list === undefined || list.length === length) return;
  throw invalid(side, `${field} has ${list.length} entries for ${length} KV cache groups`);
}

function checkRegion(side: string, index: number, region: RegionGeometry, numGroups: number): void {
  const where = `${side}, region ${index} "${region.name}"`;
  integer(where, "baseAddress", region.baseAddress, 0);
  integer(where, "numBlocks", region.numBlocks, 1);
  integer(where, "blockLengthBytes", region.blockLengthBytes, 1);
  integer(where, "blockStrideBytes", region.blockStrideBytes, 1);
  integer(where, "groupId", region.groupId, SHARED_REGION);
  if (region.blockStrideBytes < region.blockLengthBytes) {
    throw invalid(
      where,
      `blocks of ${region.blockLengthBytes} bytes overlap at a stride of ${region.blockStrideBytes} bytes`,
    );
  }
  if (region.numKvHeads !== undefined) integer(where, "numKvHeads", region.numKvHeads, 1);
  if (region.cellBytes !== undefined) integer(where, "cellBytes", region.cellBytes, 1);
  if (region.deviceId !== undefined) integer(where, "deviceId", region.deviceId, 0);
  for (const group of region.groupIds ?? []) {
    integer(where, "groupIds", group, 0);
    if (group >= numGroups)
      throw invalid(where, `groupIds name ${group}, the model has ${numGroups} groups`);
  }
  if (region.groupId >= numGroups) {
    throw invalid(
      where,
      `groupId ${region.groupId}, but the model has ${numGroups} KV cache groups`,
    );
  }
  const end =
    region.baseAddress + (region.numBlocks - 1) * region.blockStrideBytes + region.blockLengthBytes;
  if (!Number.isSafeInteger(end))
    throw invalid(
      where,
      `it ends at ${end}, beyond the addresses that a number holds exactly (2^53)`,
    );
}

/**
 * A block count that is rounded down would hide blocks of the region, and shift the ids of those
 * after it.
 */
function requireWholeBlocks(
  side: string,
  index: number,
  region: RegionGeometry,
  rank: RankGeometry,
): void {
  const { physicalBlocksPerLogical: ratio } = rank;
  if (region.numBlocks % ratio === 0) return;
  throw invalid(
    `${side}, region ${index} "${region.name}"`,
    `${region.numBlocks} kernel blocks do not divide into logical blocks of ${ratio} kernel blocks`,
  );
}

function integer(where: string, field: string, value: number, minimum: number): void {
  if (Number.isSafeInteger(value) && value >= minimum) return;
  throw invalid(where, `${field} is ${value}, expected an integer of at least ${minimum}`);
}

function invalid(where: string, what: string): KvError {
  return invalidPlan(`${where}: ${what}`, { where, what });
}
