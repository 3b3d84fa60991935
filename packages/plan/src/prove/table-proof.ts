import type { RegionIndexing, SegmentPlan } from "../engine/engine-plan-types.js";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { blockBytes } from "./contents/block-contents.js";
import { counterpart, type ProofSubject } from "./contents/proof-subject.js";
import type { DescriptorLookup } from "./descriptor-lookup.js";
import { fail } from "./proof-result.js";

/** One side of a segment: its rows in one list. */
interface SegmentSide {
  readonly owner: string;
  readonly rank: RankGeometry;
  readonly region: number;
  readonly memory: DescriptorLookup;
  readonly steps: RegionIndexing;
  readonly parts: number;
  readonly segment: SegmentPlan;
}

/**
 * Proves for all tables of a plan, and for every block, that the indexing gives each block of each
 * segment a descriptor, and that a part has the same place within every block. So the proof of a
 * sampled request holds for any blocks. Descriptors of a row are evenly spaced: where all blocks of
 * a part are in one row, three of them (first, second, last) decide for all. Returns the number of
 * descriptors.
 */
export function proveTables(subject: ProofSubject): number {
  const { plan, remotes, localLookups, remoteLookups } = subject;
  let descriptors = 0;
  for (const [index, source] of plan.sources.entries()) {
    const rank = remotes[index] as RankGeometry;
    for (const number of source.segments) {
      const segment = plan.segments[number];
      const [mine, theirs] = [plan.localIndexing[number], source.remoteIndexing[number]];
      const [local, remote] = [
        localLookups[index]?.[segment?.list ?? -1],
        remoteLookups[index]?.[segment?.list ?? -1],
      ];
      const region = segment === undefined ? undefined : plan.local.regions[segment.region];
      const remoteRegion = region === undefined ? undefined : counterpart(region, rank, plan.local);
      if (
        segment === undefined ||
        mine === undefined ||
        theirs === undefined ||
        local === undefined ||
        remote === undefined ||
        remoteRegion === undefined
      ) {
        fail(
          "descriptor-step",
          `segment ${number} of the source at rank ${rank.tpRank} has no descriptors`,
          {
            segment: number,
          },
        );
      }
      proveSide({
        owner: "local",
        rank: plan.local,
        region: segment.region,
        memory: local,
        steps: mine,
        parts: segment.localParts,
        segment,
      });
      proveSide({
        owner: `remote rank ${rank.tpRank}`,
        rank,
        region: remoteRegion,
        memory: remote,
        steps: theirs,
        parts: segment.remoteParts,
        segment,
      });
    }
    for (const memory of [...(localLookups[index] ?? []), ...(remoteLookups[index] ?? [])])
      descriptors += memory.count;
  }
  return descriptors;
}

function proveSide({ owner, rank, region, memory, steps, parts, segment }: SegmentSide): void {
  const own = rank.regions[region] as RegionGeometry;
  const kernelBlocks = segment.unit === "kernel-block" ? 1 : rank.physicalBlocksPerLogical;
  const strideBytes = own.blockStrideBytes * kernelBlocks;
  const bytes = blockBytes(own, { kernelBlocks, usesPadding: segment.unit === "logical-block" });
  const count = Math.floor(own.numBlocks / kernelBlocks);
  let begin = -1;
  let partBytes = 0;
  for (let part = 0; part < parts; part++) {
    const id = (block: number) => steps.offset + block * steps.blockStep + part * steps.partStep;
    const together = memory.rowIndex(id(0)) === memory.rowIndex(id(count - 1));
    const looked = together ? [0, Math.min(1, count - 1), count - 1] : [...Array(count).keys()];
    const first = memory.place(id(0)).from;
    if (part === 0) begin = first;
    if (part === 1) partBytes = first - begin;
    const offset = begin + part * partBytes;
    for (const block of looked) {
      const place = memory.place(id(block));
      const right =
        place.region === region &&
        place.from === block * strideBytes + offset &&
        place.lengthBytes === segment.lengthBytes &&
        offset >= 0 &&
        offset + segment.lengthBytes <= bytes;
      if (right) continue;
      const name = `"${own.name}" ${segment.piece}`.trim();
      fail(
        "descriptor-step",
        `${owner}: part ${part} of block ${block} of ${name} is ${place.lengthBytes} bytes at ${place.from} of region ` +
          `${place.region}; expected ${segment.lengthBytes} bytes at ${block * strideBytes + offset} of region ${region}, within a block of ${bytes}`,
        { region, block, part },
      );
    }
  }
}
