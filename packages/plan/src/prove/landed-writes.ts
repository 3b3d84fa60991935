import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { RequestPlan } from "../request/request-plan-types.js";
import type { Write } from "./block-pattern.js";
import { type BlockContents, blockBytes } from "./contents/block-contents.js";
import type { ProofSubject, RegionContents } from "./contents/proof-subject.js";
import type { MemoryPlace } from "./descriptor-lookup.js";
import type { BlockTokens, NeededTokens } from "./needed-tokens.js";
import { fail, type PlanFault } from "./proof-result.js";

/** A destination block's group, and what its bytes mean. */
export interface Owner {
  readonly demand: NeededTokens;
  readonly regionContents: RegionContents;
  /** Position of the block in the group's list. */
  readonly position: number;
}

/** Per region: the owner of each kernel block that the request fills. */
export type Owners = readonly ReadonlyMap<number, Owner>[];

/**
 * Per region and block (`blockKey`): what lands there; tokens counted from the sequence's begin.
 */
export type Landed = readonly ReadonlyMap<number, readonly Write[]>[];

/**
 * Blocks of a state are logical ones, all others kernel blocks; in one region both may have the
 * same number.
 */
export function blockKey(block: number, { usesPadding }: BlockContents): number {
  return usesPadding ? -1 - block : block;
}

/** Every descriptor pair of every read, as a write into a block of the request. */
export function landedWrites(subject: ProofSubject, request: RequestPlan, owners: Owners): Landed {
  const { plan, localLookups, remoteLookups, remotes } = subject;
  const landed = plan.local.regions.map(() => new Map<number, Write[]>());
  for (const read of request.reads) {
    const source = read.sourceIndex;
    const [local, remote, rank] = [
      localLookups[source]?.[read.listIndex],
      remoteLookups[source]?.[read.listIndex],
      remotes[source],
    ];
    if (local === undefined || remote === undefined || rank === undefined) {
      fail(
        "wrong-source",
        `a read names list ${read.listIndex} of source ${source}; the plan has ${plan.sources.length} sources`,
        { source, list: read.listIndex },
      );
    }
    if (rank.tpRank !== read.remoteRank || (rank.ppRank ?? 0) !== read.remotePpRank) {
      fail(
        "wrong-source",
        `a read of rank ${read.remoteRank} goes through the lists of rank ${rank.tpRank}`,
        { source },
      );
    }
    for (const [localId, remoteId, count] of pairsOf(read)) {
      for (let step = 0; step < count; step++) {
        const [to, from] = [local.place(localId + step), remote.place(remoteId + step)];
        const at = { localRank: plan.local.tpRank, remoteRank: rank.tpRank };
        const write = writeOf(subject, { to, from, source, rank, owners, at });
        const blocks = landed[to.region] as Map<number, Write[]>;
        const before = blocks.get(write.block);
        if (before === undefined) blocks.set(write.block, [write]);
        else before.push(write);
      }
    }
  }
  return landed;
}

/**
 * The runs `[localId, remoteId, count]` of a read. A transport may get runs or ids, so both must be
 * equal.
 */
function* pairsOf(read: RequestPlan["reads"][number]): Iterable<readonly [number, number, number]> {
  const { localIds, remoteIds, runs, remoteRank } = read;
  const differ = (what: string): never =>
    fail("wrong-source", `the runs and the ids of a read differ: ${what}`, { remoteRank });
  if (localIds.length !== remoteIds.length)
    differ(`${localIds.length} local and ${remoteIds.length} remote ids`);
  let inOrder = true;
  let at = 0;
  for (let row = 0; row + 2 < runs.length; row += 3) {
    const [localId, remoteId, count] = [
      runs[row] as number,
      runs[row + 1] as number,
      runs[row + 2] as number,
    ];
    for (let step = 0; step < count && inOrder; step++)
      inOrder = localIds[at + step] === localId + step && remoteIds[at + step] === remoteId + step;
    at += count;
    yield [localId, remoteId, count];
  }
  if (at !== localIds.length) differ(`${at} and ${localIds.length} descriptors`);
  if (inOrder) return;
  const remoteOf = new Map<number, number>();
  for (const [index, id] of localIds.entries()) remoteOf.set(id, remoteIds[index] as number);
  for (let row = 0; row + 2 < runs.length; row += 3) {
    const [localId, remoteId, count] = [
      runs[row] as number,
      runs[row + 1] as number,
      runs[row + 2] as number,
    ];
    for (let step = 0; step < count; step++)
      if (remoteOf.get(localId + step) !== remoteId + step)
        differ(`local descriptor ${localId + step}`);
  }
}

interface Pair {
  readonly to: MemoryPlace;
  readonly from: MemoryPlace;
  readonly source: number;
  readonly rank: RankGeometry;
  readonly owners: Owners;
  readonly at: PlanFault["at"];
}

function writeOf(
  { plan }: ProofSubject,
  { to, from, source, rank, owners, at }: Pair,
): Write & { readonly block: number } {
  const region = plan.local.regions[to.region] as RegionGeometry;
  const kernelBlock = Math.floor(to.from / region.blockStrideBytes);
  const owner = owners[to.region]?.get(kernelBlock);
  const where = { ...at, region: region.name, block: kernelBlock };
  if (owner === undefined) {
    fail(
      "foreign-write",
      `kernel block ${kernelBlock} of region "${region.name}" is written, and does not belong to the request`,
      where,
    );
  }
  if (to.lengthBytes !== from.lengthBytes)
    fail("descriptor-lengths", `${from.lengthBytes} bytes are read into ${to.lengthBytes}`, where);
  const { demand, regionContents } = owner;
  if (regionContents.remoteRegions[source] !== from.region) {
    fail(
      "wrong-source",
      `region "${region.name}" is filled from region "${rank.regions[from.region]?.name}"`,
      where,
    );
  }
  const remoteRegion = rank.regions[from.region] as RegionGeometry;
  const here = placeInBlock(region, to, regionContents.local, where);
  const there = placeInBlock(
    remoteRegion,
    from,
    regionContents.sources[source] ?? regionContents.local,
    where,
  );
  const held = demand.remotes[source] as BlockTokens;
  const position = held.position.get(there.block);
  if (position === undefined) {
    fail(
      "wrong-source",
      `remote block ${there.block} is read, and does not belong to the request`,
      {
        ...where,
        remoteBlock: there.block,
      },
    );
  }
  return {
    block: blockKey(here.block, regionContents.local),
    offset: here.offset,
    lengthBytes: to.lengthBytes,
    source,
    remoteOffset: there.offset,
    remoteToken: held.tokens[position] as number,
  };
}

/** The block of a descriptor, which it must not leave. */
function placeInBlock(
  region: RegionGeometry,
  { from, lengthBytes }: MemoryPlace,
  contents: BlockContents,
  where: PlanFault["at"],
): { readonly block: number; readonly offset: number } {
  const strideBytes = region.blockStrideBytes * contents.kernelBlocks;
  const block = Math.floor(from / strideBytes);
  const offset = from - block * strideBytes;
  const bytes = blockBytes(region, contents);
  if (offset + lengthBytes > bytes)
    fail(
      "descriptor-outside",
      `${lengthBytes} bytes from byte ${offset} of a block leave its ${bytes} bytes`,
      where,
    );
  return { block, offset };
}
