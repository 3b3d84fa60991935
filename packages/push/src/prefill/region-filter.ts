import type { DescriptorPairs, DescriptorRuns } from "@kv/interface";
import type { EngineTransferPlan, RequestRead } from "@kv/plan";

/** The descriptors of a read that are in some of the remote's regions. */
export interface ReadParts {
  of(
    plan: EngineTransferPlan,
    read: RequestRead,
    has: (region: string) => boolean,
  ): DescriptorPairs | DescriptorRuns;
}

interface Range {
  readonly from: number;
  readonly until: number;
  readonly region: string;
}

export function createReadParts(): ReadParts {
  const ranges = new WeakMap<EngineTransferPlan, Map<string, readonly Range[]>>();

  /** Where each region's descriptors are in the list of the read. */
  function rangesOf(plan: EngineTransferPlan, { sourceIndex, listIndex }: RequestRead): readonly Range[] {
    const known = ranges.get(plan) ?? new Map<string, readonly Range[]>();
    ranges.set(plan, known);
    const key = `${sourceIndex} ${listIndex}`;
    const found = known.get(key);
    if (found !== undefined) return found;
    const made = plan.segments.flatMap(({ list, remoteRegion }, index): Range[] => {
      const indexing = plan.sources[sourceIndex]?.remoteIndexing[index];
      if (list !== listIndex || indexing === undefined || indexing.count === 0) return [];
      const { offset, count } = indexing;
      return [{ from: offset, until: offset + count, region: plan.remote.regions[remoteRegion]?.name ?? "" }];
    });
    known.set(key, made);
    return made;
  }

  return {
    of(plan, read, has) {
      const all = rangesOf(plan, read);
      const wanted = all.filter(({ region }) => has(region));
      if (wanted.length === all.length) return read.descriptors;
      const { localIds, remoteIds } = read;
      const local = new Int32Array(localIds.length);
      const remote = new Int32Array(localIds.length);
      let count = 0;
      // Ids come segment by segment: the range that held the last one mostly holds the next.
      let range = wanted[0];
      for (let i = 0; i < remoteIds.length; i++) {
        const id = remoteIds[i] ?? 0;
        const inside = ({ from, until }: Range) => id >= from && id < until;
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
    },
  };
}
