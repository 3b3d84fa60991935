import type { DescriptorTable } from "@kv/interface";
import { DESCRIPTOR_ROW } from "@kv/interface";
import type { RegionIndexing } from "../engine-plan-types.js";
import type { RankGeometry } from "../geometry.js";
import type { NamedMemory } from "./named-memory.js";
import type { ProofSubject } from "./pair-meaning.js";
import { fail } from "./verdict.js";

/**
 * Proves of all tables of a plan, for every block at once: that the indexing names each block of each region, and that a part of a block is at
 * the same place within every block. So what holds for the blocks of a sampled request holds for any. A row is affine in its index: where
 * all blocks of a part fall into one row, three of them (first, second, last) decide for all. Returns the number of descriptors.
 */
export function proveTables({ plan, remotes, localMemory, remoteMemory }: ProofSubject): number {
  let descriptors = 0;
  for (const [index, source] of plan.sources.entries()) {
    const [local, remote] = [localMemory[index] as NamedMemory, remoteMemory[index] as NamedMemory];
    const rank = remotes[index] as RankGeometry;
    // What is read is what is written: the lengths of one side are asked of both.
    const lengths = plan.remoteIndexing.map((steps) => remote.place(steps.offset).lengthBytes);
    proveSide(
      "local",
      source.localTable,
      local,
      plan.local,
      plan.localIndexing,
      plan.blockSizeRatio,
      lengths,
    );
    proveSide(
      `remote rank ${rank.tpRank}`,
      source.remoteTable,
      remote,
      rank,
      plan.remoteIndexing,
      1,
      lengths,
    );
    descriptors += local.count + remote.count;
  }
  return descriptors;
}

function proveSide(
  whose: string,
  table: DescriptorTable,
  memory: NamedMemory,
  rank: RankGeometry,
  indexing: readonly RegionIndexing[],
  parts: number,
  lengthsBytes: readonly number[],
): void {
  const starts = rowStarts(table);
  for (const [region, { numBlocks, name }] of rank.regions.entries()) {
    const steps = indexing[region];
    if (steps === undefined) {
      fail("descriptor-step", `${whose}: region "${name}" has no descriptors`, { region });
    }
    const lengthBytes = lengthsBytes[region];
    for (let part = 0; part < parts; part++) {
      const id = (block: number) => steps.offset + block * steps.blockStep + part * steps.partStep;
      const together = rowIndex(starts, id(0)) === rowIndex(starts, id(numBlocks - 1));
      const looked = together ? [0, Math.min(1, numBlocks - 1), numBlocks - 1] : [...Array(numBlocks).keys()];
      const begin = memory.place(steps.offset);
      const offset = begin.offset + (part * (rank.regions[region]?.blockLengthBytes ?? 0)) / parts;
      for (const block of looked) {
        const place = memory.place(id(block));
        if (
          place.region === region &&
          place.block === block &&
          place.offset === offset &&
          place.lengthBytes === lengthBytes
        )
          continue;
        fail(
          "descriptor-step",
          `${whose}: part ${part} of block ${block} of region "${name}" is ${place.lengthBytes} bytes at block ${place.block} + ${place.offset} bytes of region ` +
            `${place.region}; expected ${lengthBytes} bytes at block ${block} + ${offset} bytes of region ${region}`,
          { region, block, part },
        );
      }
    }
  }
}

function rowStarts(table: DescriptorTable): readonly number[] {
  const starts: number[] = [];
  let next = 0;
  for (let at = 0; at < table.rows.length; at += DESCRIPTOR_ROW) {
    starts.push(next);
    next += table.rows[at + DESCRIPTOR_ROW - 1] ?? 0;
  }
  return starts;
}

function rowIndex(starts: readonly number[], id: number): number {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((starts[middle] as number) <= id) low = middle;
    else high = middle - 1;
  }
  return low;
}
