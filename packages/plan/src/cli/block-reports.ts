import type { EngineTransferPlan } from "../engine-plan-types.js";
import type { RankGeometry } from "../geometry.js";
import { namedMemory } from "../prove/named-memory.js";
import { passByBlock } from "../prove/pass-effect.js";
import { demandOf } from "../prove/request-demand.js";
import type { RequestBlocks, RequestPlan } from "../request-plan-types.js";
import type { BlockReport } from "./report.js";

/** Blocks per rank and group in a report: a page that shows more is read by nobody. */
const BLOCKS_SHOWN = 48;

type Piece = BlockReport["pieces"][number];

/** Where the bytes of a rank's blocks come from, in the first region of each group. */
export function blockReports(
  plan: EngineTransferPlan,
  prefill: readonly RankGeometry[],
  blocks: RequestBlocks,
  request: RequestPlan,
): { readonly reports: readonly BlockReport[]; readonly leftOut: number } {
  const shown = plan.regionsOfGroup.map((regions) => regions[0] ?? 0);
  const pieces = piecesByBlock(plan, prefill, request, new Set(shown));
  const reports: BlockReport[] = [];
  let leftOut = 0;
  for (const [group, region] of shown.entries()) {
    const demand = demandOf(group, plan.groups[group] ?? "full", plan.local, plan.remote, blocks);
    const pass = passByBlock(request.receivePass?.groups.find((one) => one.group === group));
    leftOut += Math.max(0, demand.localBlocks.length - BLOCKS_SHOWN);
    for (const [position, block] of demand.localBlocks.slice(0, BLOCKS_SHOWN).entries()) {
      const { permuted = false, zeroFromToken = Number.POSITIVE_INFINITY } = pass.get(block) ?? {};
      const own = pieces.get(region)?.get(block) ?? [];
      reports.push({
        decodeRank: plan.local.tpRank,
        group,
        block,
        firstToken: demand.localBegin + position * plan.local.kernelBlockSize,
        lengthBytes: plan.local.regions[region]?.blockLengthBytes ?? 0,
        permuted,
        zeroFrom: Number.isFinite(zeroFromToken) ? zeroFromToken : null,
        pieces: own.sort((one, other) => one.offset - other.offset),
      });
    }
  }
  return { reports, leftOut };
}

function piecesByBlock(
  plan: EngineTransferPlan,
  prefill: readonly RankGeometry[],
  request: RequestPlan,
  regions: ReadonlySet<number>,
): ReadonlyMap<number, ReadonlyMap<number, Piece[]>> {
  const found = new Map([...regions].map((region) => [region, new Map<number, Piece[]>()] as const));
  for (const read of request.reads) {
    const source = plan.sources[read.sourceIndex];
    const rank = prefill[read.remoteRank];
    if (source === undefined || rank === undefined) continue;
    const local = namedMemory("local", source.localTable, plan.local);
    const remote = namedMemory("remote", source.remoteTable, rank);
    for (let index = 0; index < read.localIds.length; index++) {
      const to = local.place(read.localIds[index] as number);
      const blocks = found.get(to.region);
      if (blocks === undefined) continue;
      const from = remote.place(read.remoteIds[index] as number);
      const piece: Piece = {
        offset: to.offset,
        lengthBytes: to.lengthBytes,
        prefillRank: read.remoteRank,
        remoteBlock: from.block,
        remoteOffset: from.offset,
      };
      const before = blocks.get(to.block);
      if (before === undefined) blocks.set(to.block, [piece]);
      else before.push(piece);
    }
  }
  return found;
}
