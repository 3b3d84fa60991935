import { KvError } from "@kv/interface";
import type { RegionGeometry } from "../geometry/rank-geometry.js";
import { effectsOf, type MovedBytes, type PassEffect } from "../receive/apply-receive-pass.js";
import type { ReceivePassGroup } from "../receive/build-receive-pass.js";
import type { RequestBlocks } from "../request/request-checks.js";
import type { RequestPlan } from "../request/request-plan.js";
import type { RequestRead } from "../request/request-read.js";
import {
  type BlockContents,
  blockBytes,
  firstDifference,
  inOrder,
  type Label,
  labelsOf,
  moved,
} from "./block-labels.js";
import { cacheSemantics, regionsHolding } from "./cache-semantics.js";
import type { MemoryPlace } from "./descriptors.js";
import { type BlockTokens, type NeededTokens, neededTokens } from "./needed-tokens.js";
import { fail, type PlanFault } from "./proof-result.js";
import type { ProofSubject, RegionContents } from "./proof-subject.js";

/** A block that the request fills, and all that is moved into it. */
interface Destination {
  readonly demand: NeededTokens;
  readonly region: number;
  readonly contents: RegionContents;
  readonly block: number;
  /** The token of the sequence with which the block begins. */
  readonly firstToken: number;
  readonly moves: Move[];
}

/** A descriptor pair: bytes of a source's block that move into a block of the destination. */
interface Move extends MovedBytes {
  readonly source: number;
  /** The first token of the source's block, from the first one of the destination on. */
  readonly token: number;
}

/**
 * Proves one request of one plan: labels every byte of the sources' blocks, moves the labels as the
 * descriptors and the receive pass say, and compares them with those that the blocks must have.
 * Blocks that differ only in their place are moved once; `proven` has those of earlier requests.
 * Returns the number of destination blocks, counted in each region.
 */
export function proveRequest(
  subject: ProofSubject,
  blocks: RequestBlocks,
  request: RequestPlan,
  proven: Set<string>,
): number {
  const { plan, model, remotes } = subject;
  const demands = [...plan.groups.keys()]
    .filter((group) => (blocks.localBlockIds[group]?.length ?? 0) > 0)
    .map((group) => neededTokens(group, plan.local, remotes, model, blocks));
  const destinations = demands.flatMap((demand) =>
    regionsHolding(plan.local, demand.group).flatMap((region) => {
      const contents = subject.contents(region, demand.group);
      return demand.local.blocks.map((block, position): Destination => {
        const firstToken = demand.local.tokens[position] as number;
        return { demand, region, contents, block, firstToken, moves: [] };
      });
    }),
  );

  const byKernelBlock = destinationsByKernelBlock(subject, destinations);
  for (const read of request.reads) addMoves(subject, read, byKernelBlock);
  const passes = passesOf(request, demands);
  for (const destination of destinations) {
    const pass = passes.get(destination.demand)?.get(destination.block) ?? UNTOUCHED;
    const { contents, demand, firstToken, moves } = destination;
    const { tokens } = contents.local;
    const within = (token: number) => Math.max(0, Math.min(tokens, token - firstToken));
    const needed = { from: within(demand.fromToken), to: within(demand.endToken) };
    const key = `${contents.key} ${demand.group} ${JSON.stringify([needed, pass, moves])}`;
    if (proven.has(key)) continue;
    proveBlock(subject, destination, needed, pass);
    proven.add(key);
  }
  return destinations.length;
}

type ByKernelBlock = readonly ReadonlyMap<number, Destination>[];

/** By region and kernel block. Two groups of a request may not list the same block. */
function destinationsByKernelBlock(
  { plan }: ProofSubject,
  destinations: readonly Destination[],
): ByKernelBlock {
  const found = plan.local.regions.map(() => new Map<number, Destination>());
  for (const destination of destinations) {
    const { region, block, demand } = destination;
    const known = found[region] as Map<number, Destination>;
    const { kernelBlocks } = destination.contents.local;
    for (let part = 0; part < kernelBlocks; part++) {
      const kernelBlock = block * kernelBlocks + part;
      const before = known.get(kernelBlock)?.demand.group;
      if (before !== undefined)
        fail(
          "request-tables",
          `kernel block ${kernelBlock} of region ${region} is given to groups ${before} and ${demand.group}`,
          { region, block: kernelBlock },
        );
      known.set(kernelBlock, destination);
    }
  }
  return found;
}

/** Adds every descriptor pair of a read to the block that it fills. */
function addMoves(
  { plan, lookups, remotes }: ProofSubject,
  read: RequestRead,
  destinations: ByKernelBlock,
): void {
  const { sourceIndex: source, listIndex: list } = read;
  const [lookup, rank] = [lookups[source]?.[list], remotes[source]];
  if (lookup === undefined || rank === undefined)
    fail(
      "wrong-source",
      `a read names list ${list} of source ${source}; the plan has ${plan.sources.length} sources`,
      { source, list },
    );
  if (rank.tpRank !== read.remoteRank || (rank.ppRank ?? 0) !== read.remotePpRank)
    fail(
      "wrong-source",
      `a read of rank ${read.remoteRank} goes through the lists of rank ${rank.tpRank}`,
      { source },
    );

  for (const [localId, remoteId] of pairsOf(read)) {
    const [to, from] = [lookup.local.place(localId), lookup.remote.place(remoteId)];
    const region = plan.local.regions[to.region] as RegionGeometry;
    const kernelBlock = Math.floor(to.from / region.blockStrideBytes);
    const where = {
      localRank: plan.local.tpRank,
      remoteRank: rank.tpRank,
      region: region.name,
      block: kernelBlock,
    };
    const destination = destinations[to.region]?.get(kernelBlock);
    if (destination === undefined)
      fail(
        "foreign-write",
        `kernel block ${kernelBlock} of region "${region.name}" is written, and does not belong to the request`,
        where,
      );
    if (to.lengthBytes !== from.lengthBytes)
      fail(
        "descriptor-lengths",
        `${from.lengthBytes} bytes are read into ${to.lengthBytes}`,
        where,
      );
    const { contents, demand, firstToken, moves } = destination;
    const remoteRegion = rank.regions[from.region] as RegionGeometry;
    if (contents.remoteRegions[source] !== from.region)
      fail(
        "wrong-source",
        `region "${region.name}" is filled from region "${remoteRegion.name}"`,
        where,
      );
    const here = placeInBlock(region, to, contents.local, where);
    const there = placeInBlock(
      remoteRegion,
      from,
      contents.sources[source] ?? contents.local,
      where,
    );
    const held = demand.remotes[source] as BlockTokens;
    const position = held.position.get(there.block);
    if (position === undefined)
      fail(
        "wrong-source",
        `remote block ${there.block} is read, and does not belong to the request`,
        { ...where, remoteBlock: there.block },
      );
    moves.push({
      from: there.offset,
      at: here.offset,
      lengthBytes: to.lengthBytes,
      source,
      token: (held.tokens[position] as number) - firstToken,
    });
  }
}

/** The pairs of ids of a read. A transport may get runs or ids, so both must have the same. */
function pairsOf({ localIds, remoteIds, runs, remoteRank }: RequestRead): [number, number][] {
  const pairs: [number, number][] = [];
  for (let row = 0; row + 2 < runs.length; row += 3) {
    const [localId = 0, remoteId = 0, count = 0] = runs.subarray(row, row + 3);
    for (let step = 0; step < count; step++) pairs.push([localId + step, remoteId + step]);
  }
  const differ = (what: string): never =>
    fail("wrong-source", `the runs and the ids of a read differ: ${what}`, { remoteRank });
  if (localIds.length !== pairs.length || remoteIds.length !== pairs.length)
    differ(`${pairs.length} pairs, ${localIds.length} local and ${remoteIds.length} remote ids`);
  const remoteOf = new Map<number, number>();
  for (const [index, id] of localIds.entries()) remoteOf.set(id, remoteIds[index] as number);
  for (const [localId, remoteId] of pairs)
    if (remoteOf.get(localId) !== remoteId) differ(`local descriptor ${localId}`);
  return pairs;
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

/** The effect of the receive pass on one block, seen from the finished block. */
export interface BlockPass {
  /** Its heads and tokens are put in order. */
  readonly permuted: boolean;
  /** Tokens of the block before this one are zeroed; 0: none. */
  readonly zeroUntilToken: number;
  /** Tokens of the block from here on are zeroed; Infinity: none. */
  readonly zeroFromToken: number;
}

const UNTOUCHED: BlockPass = {
  permuted: false,
  zeroUntilToken: 0,
  zeroFromToken: Number.POSITIVE_INFINITY,
};

/** The pass of one group by block id. Each block may be listed once for each action. */
export function passByBlock(pass: ReceivePassGroup | undefined): ReadonlyMap<number, BlockPass> {
  const found = new Map<number, BlockPass>();
  if (pass === undefined) return found;
  for (const block of pass.permuteBlockIds) {
    if (found.has(block))
      fail("receive-pass", `kernel block ${block} is permuted twice`, { block });
    found.set(block, { ...UNTOUCHED, permuted: true });
  }
  const zero = (block: number, untilToken: number, fromToken: number) => {
    const { permuted, zeroUntilToken, zeroFromToken } = found.get(block) ?? UNTOUCHED;
    found.set(block, {
      permuted,
      zeroUntilToken: Math.max(untilToken, zeroUntilToken),
      zeroFromToken: Math.min(fromToken, zeroFromToken),
    });
  };
  const { zeroBlockIds, leadingBlock, partialBlock } = pass;
  for (const block of zeroBlockIds) zero(block, 0, 0);
  if (leadingBlock !== undefined)
    zero(leadingBlock.blockId, leadingBlock.untilToken, UNTOUCHED.zeroFromToken);
  if (partialBlock !== undefined) zero(partialBlock.blockId, 0, partialBlock.fromToken);
  return found;
}

/** The pass by group and block. It may only change blocks of the request. */
function passesOf(
  { receivePass }: RequestPlan,
  demands: readonly NeededTokens[],
): ReadonlyMap<NeededTokens, ReadonlyMap<number, BlockPass>> {
  const found = new Map<NeededTokens, ReadonlyMap<number, BlockPass>>();
  for (const pass of receivePass?.groups ?? []) {
    const { group } = pass;
    const demand = demands.find((one) => one.group === group);
    if (demand === undefined)
      fail(
        "receive-pass",
        `the receive pass names group ${group}, of which the request fills nothing`,
        { group },
      );
    if (found.has(demand))
      fail("receive-pass", `the receive pass names group ${group} more than once`, { group });
    const blocks = passByBlock(pass);
    for (const block of blocks.keys()) {
      if (demand.local.position.has(block)) continue;
      fail(
        "receive-pass",
        `the receive pass changes kernel block ${block}, which does not belong to the request`,
        { group, block },
      );
    }
    found.set(demand, blocks);
  }
  return found;
}

/** What the receive pass does within a block, by the code that does it. */
function effectOfPass(
  { plan }: ProofSubject,
  { demand: { group }, region }: Destination,
  { permuted, zeroUntilToken: untilToken, zeroFromToken: fromToken }: BlockPass,
): Pick<PassEffect, "copies" | "zeroed"> {
  const isWhole = fromToken <= 0;
  const pass: ReceivePassGroup = {
    group,
    permuteBlockIds: Int32Array.from(permuted ? [0] : []),
    zeroBlockIds: Int32Array.from(isWhole ? [0] : []),
    leadingBlock: untilToken > 0 ? { blockId: 0, untilToken } : undefined,
    partialBlock:
      isWhole || fromToken === Number.POSITIVE_INFINITY ? undefined : { blockId: 0, fromToken },
  };
  try {
    const effects = [...effectsOf(plan, { groups: [pass] })];
    return effects.find(({ index }) => index === region) ?? { copies: [], zeroed: [] };
  } catch (error) {
    if (!KvError.is(error)) throw error;
    return fail("receive-pass", error.message, { group, region });
  }
}

/** Moves the labels of a block's bytes, and compares them with those that it must have. */
function proveBlock(
  subject: ProofSubject,
  destination: Destination,
  needed: { readonly from: number; readonly to: number },
  pass: BlockPass,
): void {
  const { plan, model } = subject;
  const { region, block, firstToken, contents, demand } = destination;
  const where = {
    localRank: plan.local.tpRank,
    region: plan.local.regions[region]?.name ?? "",
    group: demand.group,
    block,
    firstToken,
  };
  const landed = landedLabels(destination, where);
  const { copies, zeroed } =
    pass === UNTOUCHED ? { copies: [], zeroed: [] } : effectOfPass(subject, destination, pass);
  const finished = pass.permuted ? inOrder(copies.flatMap((copy) => moved(landed, copy))) : landed;
  const zeros = inOrder(zeroed.map((bytes): Label => ({ ...bytes, ...ZERO })));

  const { tokensPerStep } = contents.local;
  const lists = cacheSemantics(model.groups[demand.group] ?? "")?.lists;
  // The pass zeroes no part of a block that is known as a whole only; the engine masks it.
  const isPart = tokensPerStep > 1 && needed.to > 0;
  const clears = plan.uncovered === "zeroed" && !isPart;
  for (const want of labelsOf(contents.local)) {
    const { head, token, byte, at: offset, lengthBytes } = want;
    const at = { ...where, offset, head, tokenInBlock: token, cellByte: byte };
    const place = { from: offset, at: offset, lengthBytes };
    const zeroBytes = moved(zeros, place).reduce((sum, zero) => sum + zero.lengthBytes, 0);
    const [isLead, isTail] = [token + tokensPerStep <= needed.from, token >= needed.to];
    const got = moved(finished, place);
    if (isLead && got.length > 0)
      fail("foreign-write", "a token before the first that the request takes is overwritten", at);
    if (isTail && clears && lists !== "last" && zeroBytes < lengthBytes)
      fail(
        "tail-not-cleared",
        "a token that the request does not have keeps the bytes of another",
        at,
      );
    if (isLead && clears && lists === "window" && zeroBytes < lengthBytes)
      fail("lead-not-cleared", "a token before the remote's window keeps the bytes of another", at);
    if (isLead || isTail) continue;
    if (zeroBytes > 0)
      fail("needed-but-cleared", "the receive pass zeroes a token that the request needs", at);
    requireLabel(want, got, at);
  }
}

const ZERO = { cell: "zero", head: 0, token: 0, byte: 0 };

/** The labels of a block when its reads have landed. */
function landedLabels({ moves, contents }: Destination, where: PlanFault["at"]): readonly Label[] {
  const labels = contents.sources.map((source) => (source === undefined ? [] : labelsOf(source)));
  let end = 0;
  return inOrder(moves).flatMap((move) => {
    if (move.at < end)
      fail("written-twice", `bytes from ${move.at} of the block are written by two descriptors`, {
        ...where,
        offset: move.at,
      });
    end = move.at + move.lengthBytes;
    return moved(labels[move.source] ?? [], move, move.token);
  });
}

/** Requires that the bytes of a label are those of the same cell. */
function requireLabel(want: Label, found: readonly Label[], where: PlanFault["at"]): void {
  const different = firstDifference(want, found);
  if (different === undefined) return;
  const { at: offset, byte, got } = different;
  const at = { ...where, offset, cellByte: byte };
  if (got === undefined)
    fail("not-written", "nothing, or padding, is written to a byte that the request needs", at);
  fail(
    "wrong-source",
    `head ${want.head}, token ${want.token} of the block, byte ${byte} of "${want.cell}" comes from head ${got.head}, ` +
      `token ${got.token}, byte ${got.byte} of "${got.cell}"`,
    at,
  );
}
