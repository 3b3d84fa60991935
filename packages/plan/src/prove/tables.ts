import type { RegionIndexing } from "../engine/descriptor-tables.js";
import type { SegmentPlan } from "../engine/source-plans.js";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { blockBytes } from "./block-labels.js";
import type { DescriptorLookup } from "./descriptors.js";
import { fail } from "./proof-result.js";
import { counterpart, type ProofSubject } from "./proof-subject.js";

/**
 * Proves for all tables of a plan that every block of each segment has descriptors, and that each
 * part has the same place within every block. So the proof of a sampled request holds for any
 * blocks. Returns the number of descriptors.
 */
export function proveTables({ plan, remotes, lookups }: ProofSubject): number {
  let descriptors = 0;
  for (const [index, source] of plan.sources.entries()) {
    const rank = remotes[index] as RankGeometry;
    for (const number of source.segments) {
      const segment = plan.segments[number];
      const region = plan.local.regions[segment?.region ?? -1];
      const remoteRegion = region && counterpart(region, rank, plan.local);
      const lookup = lookups[index]?.[segment?.list ?? -1];
      const [mine, theirs] = [plan.localIndexing[number], source.remoteIndexing[number]];
      if (!segment || !lookup || !mine || !theirs || remoteRegion === undefined)
        fail(
          "descriptor-step",
          `segment ${number} of the source at rank ${rank.tpRank} has no descriptors`,
          { segment: number },
        );
      const { region: own, localParts, remoteParts } = segment;
      proveSegment("local", plan.local, own, segment, mine, localParts, lookup.local);
      const owner = `remote rank ${rank.tpRank}`;
      proveSegment(owner, rank, remoteRegion, segment, theirs, remoteParts, lookup.remote);
    }
    for (const { local, remote } of lookups[index] ?? []) descriptors += local.count + remote.count;
  }
  return descriptors;
}

/**
 * Descriptors of a row are evenly spaced: where all blocks of a part are in one row, three of them
 * (first, second, last) decide for all.
 */
function proveSegment(
  owner: string,
  rank: RankGeometry,
  index: number,
  { unit, piece, lengthBytes }: SegmentPlan,
  { offset, blockStep, partStep }: RegionIndexing,
  parts: number,
  lookup: DescriptorLookup,
): void {
  const region = rank.regions[index] as RegionGeometry;
  const kernelBlocks = unit === "kernel-block" ? 1 : rank.physicalBlocksPerLogical;
  const strideBytes = region.blockStrideBytes * kernelBlocks;
  const bytes = blockBytes(region, { kernelBlocks, usesPadding: unit === "logical-block" });
  const count = Math.floor(region.numBlocks / kernelBlocks);
  const begin = lookup.place(offset).from;
  const partBytes = parts === 1 ? 0 : lookup.place(offset + partStep).from - begin;
  for (let part = 0; part < parts; part++) {
    const into = begin + part * partBytes;
    const id = (block: number) => offset + block * blockStep + part * partStep;
    const isOneRow = lookup.rowIndex(id(0)) === lookup.rowIndex(id(count - 1));
    const looked = isOneRow ? [0, Math.min(1, count - 1), count - 1] : [...Array(count).keys()];
    for (const block of looked) {
      const place = lookup.place(id(block));
      const expected = block * strideBytes + into;
      const isRight =
        place.region === index &&
        place.from === expected &&
        place.lengthBytes === lengthBytes &&
        into >= 0 &&
        into + lengthBytes <= bytes;
      if (isRight) continue;
      const name = `"${region.name}" ${piece}`.trim();
      fail(
        "descriptor-step",
        `${owner}: part ${part} of block ${block} of ${name} is ${place.lengthBytes} bytes at ${place.from} of region ` +
          `${place.region}; expected ${lengthBytes} bytes at ${expected} of region ${index}, within a block of ${bytes}`,
        { region: index, block, part },
      );
    }
  }
}
