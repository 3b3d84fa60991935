import type { DescriptorPairs, DescriptorRuns } from "@kv/interface";
import type { EngineTransferPlan, RequestRead } from "@kv/plan";

/** Where the descriptors of one region lie in a list of a plan: ids `from` (included) to `until` (excluded). */
interface RegionRange {
  readonly from: number;
  readonly until: number;
  readonly region: string;
}

/** Ranges by plan, then by source and list. A plan lives as long as the link to its engine. */
const rangesByPlan = new WeakMap<EngineTransferPlan, Map<string, readonly RegionRange[]>>();

/** The descriptors of a planned read that lie in the regions for which `includes` is true. All of them are returned as they are, without a copy. */
export function descriptorsInRegions(
  plan: EngineTransferPlan,
  read: RequestRead,
  includes: (region: string) => boolean,
): DescriptorPairs | DescriptorRuns {
  const ranges = rangesOf(plan, read);
  const wanted = ranges.filter(({ region }) => includes(region));
  if (wanted.length === ranges.length) return read.descriptors;
  const { localIds, remoteIds } = read;
  const local = new Int32Array(localIds.length);
  const remote = new Int32Array(localIds.length);
  let count = 0;
  // Ids are ordered by segment: the range of one id is mostly the range of the next.
  let range = wanted[0];
  for (let i = 0; i < remoteIds.length; i++) {
    const id = remoteIds[i] ?? 0;
    const inside = ({ from, until }: RegionRange) => id >= from && id < until;
    if (range === undefined) break;
    if (!inside(range)) {
      const other = wanted.find(inside);
      if (other === undefined) continue;
      range = other;
    }
    local[count] = localIds[i] ?? 0;
    remote[count] = id;
    count += 1;
  }
  return { localIds: local.subarray(0, count), remoteIds: remote.subarray(0, count) };
}

function rangesOf(plan: EngineTransferPlan, { sourceIndex, listIndex }: RequestRead): readonly RegionRange[] {
  const known = rangesByPlan.get(plan) ?? new Map<string, readonly RegionRange[]>();
  rangesByPlan.set(plan, known);
  const key = `${sourceIndex} ${listIndex}`;
  const found = known.get(key);
  if (found !== undefined) return found;
  const made = plan.segments.flatMap(({ list, remoteRegion }, index): RegionRange[] => {
    const indexing = plan.sources[sourceIndex]?.remoteIndexing[index];
    if (list !== listIndex || indexing === undefined || indexing.count === 0) return [];
    const { offset, count } = indexing;
    return [{ from: offset, until: offset + count, region: plan.remote.regions[remoteRegion]?.name ?? "" }];
  });
  known.set(key, made);
  return made;
}
