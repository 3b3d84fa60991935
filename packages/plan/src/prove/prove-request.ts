import { KvError } from "@kv/interface";
import type { RegionGeometry } from "../geometry/rank-geometry.js";
import type { ReceivePassGroup } from "../request/receive-pass.js";
import { effectsOf, type MovedBytes, type PassEffect } from "../request/receive-pass.js";
import type { RequestBlocks } from "../request/request-blocks.js";
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

interface Destination {
  readonly demand: NeededTokens;
  readonly region: number;
  readonly contents: RegionContents;
  readonly block: number;
  readonly firstToken: number;
  readonly moves: Move[];
}

interface Move extends MovedBytes {
  readonly source: number;
  /** First token of the source's block, relative to the destination's. */
  readonly token: number;
}

/**
 * Labels the bytes of the sources' blocks, moves the labels as descriptors and receive pass say,
 * and compares them with what the blocks must have. Blocks that differ only in place are in
 * `proven` after the first. Returns the number of destination blocks, counted in each region.
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
  const byKernelBlock: ByKernelBlock = plan.local.regions.map(() => new Map());
  const destinations = demands.flatMap((demand) =>
    regionsHolding(plan.local, demand.group).flatMap((region) => {
      const contents = subject.contents(region, demand.group);
      return demand.local.blocks.map((block, position) => {
        const firstToken = demand.local.tokens[position] as number;
        const made: Destination = { demand, region, contents, block, firstToken, moves: [] };
        addDestination(byKernelBlock, made);
        return made;
      });
    }),
  );
  for (const read of request.reads) addMoves(subject, read, byKernelBlock);

  const passes = passesOf(request, demands);
  for (const destination of destinations) {
    const { contents, demand, firstToken, moves, block } = destination;
    const pass = passes.get(demand)?.get(block) ?? UNTOUCHED;
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

type ByKernelBlock = readonly Map<number, Destination>[];

/** Two groups of a request may not list the same block. */
function addDestination(byKernelBlock: ByKernelBlock, destination: Destination): void {
  const { region, block, demand, contents } = destination;
  const known = byKernelBlock[region] as Map<number, Destination>;
  const { kernelBlocks } = contents.local;
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
    const block = Math.floor(to.from / region.blockStrideBytes);
    const where = {
      localRank: plan.local.tpRank,
      remoteRank: rank.tpRank,
      region: region.name,
      block,
    };
    const destination = destinations[to.region]?.get(block);
    if (destination === undefined)
      fail(
        "foreign-write",
        `kernel block ${block} of region "${region.name}" is written, and does not belong to the request`,
        where,
      );
    const { lengthBytes } = to;
    if (lengthBytes !== from.lengthBytes)
      fail("descriptor-lengths", `${from.lengthBytes} bytes are read into ${lengthBytes}`, where);
    const { contents, demand, firstToken, moves } = destination;
    const remoteRegion = rank.regions[from.region] as RegionGeometry;
    if (contents.remoteRegions[source] !== from.region)
      fail(
        "wrong-source",
        `region "${region.name}" is filled from region "${remoteRegion.name}"`,
        where,
      );
    const inSource = contents.sources[source] ?? contents.local;
    const here = placeInBlock(region, to, contents.local, where);
    const there = placeInBlock(remoteRegion, from, inSource, where);
    const held = demand.remotes[source] as BlockTokens;
    const position = held.position.get(there.block);
    if (position === undefined)
      fail(
        "wrong-source",
        `remote block ${there.block} is read, and does not belong to the request`,
        { ...where, remoteBlock: there.block },
      );
    const token = (held.tokens[position] as number) - firstToken;
    moves.push({ from: there.offset, at: here.offset, lengthBytes, source, token });
  }
}

/** A transport may get runs or ids, so both must agree. */
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

/** The effect of the receive pass on one finished block. */
export interface BlockPass {
  readonly permuted: boolean;
  /** Tokens before this one are zeroed; 0: none. */
  readonly zeroUntilToken: number;
  /** Tokens from this one on are zeroed; Infinity: none. */
  readonly zeroFromToken: number;
}

const UNTOUCHED: BlockPass = {
  permuted: false,
  zeroUntilToken: 0,
  zeroFromToken: Number.POSITIVE_INFINITY,
};

/** Returns the pass of one group by block id. Each action may list a block once. */
export function passByBlock(pass: ReceivePassGroup | undefined): ReadonlyMap<number, BlockPass> {
  const found = new Map<number, BlockPass>();
  if (pass === undefined) return found;
  const { permuteBlockIds, zeroBlockIds, leadingBlock, partialBlock } = pass;
  for (const block of permuteBlockIds) {
    if (found.has(block))
      fail("receive-pass", `kernel block ${block} is permuted twice`, { block });
    found.set(block, { ...UNTOUCHED, permuted: true });
  }
  const zero = (block: number, untilToken: number, fromToken: number) => {
    const before = found.get(block) ?? UNTOUCHED;
    found.set(block, {
      ...before,
      zeroUntilToken: Math.max(untilToken, before.zeroUntilToken),
      zeroFromToken: Math.min(fromToken, before.zeroFromToken),
    });
  };
  for (const block of zeroBlockIds) zero(block, 0, 0);
  if (leadingBlock !== undefined)
    zero(leadingBlock.blockId, leadingBlock.untilToken, UNTOUCHED.zeroFromToken);
  if (partialBlock !== undefined) zero(partialBlock.blockId, 0, partialBlock.fromToken);
  return found;
}

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

function effectOfPass(
  { plan }: ProofSubject,
  { demand: { group }, region }: Destination,
  pass: BlockPass,
): Pick<PassEffect, "copies" | "zeroed"> {
  const { permuted, zeroUntilToken: untilToken, zeroFromToken: fromToken } = pass;
  const only = (isListed: boolean) => Int32Array.from(isListed ? [0] : []);
  const isPart = fromToken > 0 && fromToken < Number.POSITIVE_INFINITY;
  const own: ReceivePassGroup = {
    group,
    permuteBlockIds: only(permuted),
    zeroBlockIds: only(fromToken <= 0),
    leadingBlock: untilToken > 0 ? { blockId: 0, untilToken } : undefined,
    partialBlock: isPart ? { blockId: 0, fromToken } : undefined,
  };
  try {
    const effects = [...effectsOf(plan, { groups: [own] })];
    return effects.find(({ index }) => index === region) ?? NO_EFFECT;
  } catch (error) {
    if (!KvError.is(error)) throw error;
    return fail("receive-pass", error.message, { group, region });
  }
}

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
    pass === UNTOUCHED ? NO_EFFECT : effectOfPass(subject, destination, pass);
  const finished = pass.permuted ? inOrder(copies.flatMap((copy) => moved(landed, copy))) : landed;
  const zeros = inOrder(zeroed.map((bytes): Label => ({ ...bytes, ...ZERO })));

  const { tokensPerStep } = contents.local;
  const lists = cacheSemantics(model.groups[demand.group] ?? "")?.lists;
  // The pass zeroes no part of a block that is only known as a whole; the engine masks it.
  const isPart = tokensPerStep > 1 && needed.to > 0;
  const clears = plan.uncovered === "zeroed" && !isPart;
  for (const want of labelsOf(contents.local)) {
    const { head, token, byte, at: offset, lengthBytes } = want;
    const at = { ...where, offset, head, tokenInBlock: token, cellByte: byte };
    const place = { from: offset, at: offset, lengthBytes };
    const zeroBytes = moved(zeros, place).reduce((sum, zero) => sum + zero.lengthBytes, 0);
    const isCleared = zeroBytes >= lengthBytes || !clears;
    const [isLead, isTail] = [token + tokensPerStep <= needed.from, token >= needed.to];
    const got = moved(finished, place);
    if (isLead && got.length > 0)
      fail("foreign-write", "a token before the first that the request takes is overwritten", at);
    if (isTail && !isCleared && lists !== "last")
      fail(
        "tail-not-cleared",
        "a token that the request does not have keeps the bytes of another",
        at,
      );
    if (isLead && !isCleared && lists === "window")
      fail("lead-not-cleared", "a token before the remote's window keeps the bytes of another", at);
    if (isLead || isTail) continue;
    if (zeroBytes > 0)
      fail("needed-but-cleared", "the receive pass zeroes a token that the request needs", at);
    requireLabel(want, got, at);
  }
}

const NO_EFFECT = { copies: [], zeroed: [] };
const ZERO = { cell: "zero", head: 0, token: 0, byte: 0 };

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
