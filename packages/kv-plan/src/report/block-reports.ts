import type { EngineTransferPlan, ModelGeometry, RankGeometry, RequestBlocks, RequestPlan } from "@kv/plan";
import { descriptorLookup, type MemoryPlace, neededTokens, passByBlock } from "@kv/plan/prove";
import type { BlockReport } from "./report.js";
import { prefillRank } from "./stage-reports.js";

/** The most blocks per rank and group in a report: a longer page is of no use. */
const BLOCKS_SHOWN = 48;

type Piece = BlockReport["pieces"][number];

/** The sources of a rank's blocks, in the first region of each group on each pipeline stage. */
export function blockReports(
  plan: EngineTransferPlan,
  prefill: readonly RankGeometry[],
  blocks: RequestBlocks,
  request: RequestPlan,
  model: Omit<ModelGeometry, "groups">,
): { readonly reports: readonly BlockReport[]; readonly leftOut: number } {
  const stageOf = stageByRegion(plan);
  const shown = plan.regionsOfGroup.flatMap((regions, group) =>
    plan.stages.flatMap((stage) => {
      const region = regions.find((one) => stageOf.get(one) === stage);
      return region === undefined ? [] : [{ group, region, stage }];
    }),
  );
  const pieces = piecesByBlock(plan, prefill, request, new Set(shown.map(({ region }) => region)));
  const reports: BlockReport[] = [];
  let leftOut = 0;
  const remotes = plan.sources.map((source) => prefillRank({ prefill }, source));
  for (const { group, region, stage } of shown) {
    // The pieces of a state are in the table of reads; a state has no heads and tokens to show.
    if (plan.groupPlans[group]?.unit !== "kernel-block" || remotes.length === 0) continue;
    const demand = neededTokens(group, plan.local, remotes, { ...model, groups: plan.groups }, blocks);
    const pass = passByBlock(request.receivePass?.groups.find((one) => one.group === group));
    leftOut += Math.max(0, demand.local.blocks.length - BLOCKS_SHOWN);
    for (const [position, block] of demand.local.blocks.slice(0, BLOCKS_SHOWN).entries()) {
      const { permuted = false, zeroFromToken = Number.POSITIVE_INFINITY } = pass.get(block) ?? {};
      const own = pieces.get(region)?.get(block) ?? [];
      reports.push({
        decodeRank: plan.local.tpRank,
        group,
        stage,
        block,
        firstToken: demand.local.tokens[position] ?? 0,
        lengthBytes: plan.local.regions[region]?.blockLengthBytes ?? 0,
        permuted,
        zeroFrom: Number.isFinite(zeroFromToken) ? zeroFromToken : null,
        pieces: own.sort((one, other) => one.offset - other.offset),
      });
    }
  }
  return { reports, leftOut };
}

/** The prefill stage that holds each region. */
function stageByRegion({ sources, segments }: EngineTransferPlan): ReadonlyMap<number, number> {
  return new Map(
    sources.flatMap((source) =>
      source.segments.flatMap((index) => {
        const region = segments[index]?.region;
        return region === undefined ? [] : [[region, source.remotePpRank] as const];
      }),
    ),
  );
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
    if (source === undefined) continue;
    const rank = prefillRank({ prefill }, read);
    const list = source.lists[read.listIndex];
    if (list === undefined) continue;
    const local = descriptorLookup("local", list.localTable, plan.local);
    const remote = descriptorLookup("remote", list.remoteTable, rank);
    for (let index = 0; index < read.localIds.length; index++) {
      const to = local.place(read.localIds[index] as number);
      const blocks = found.get(to.region);
      if (blocks === undefined) continue;
      const from = remote.place(read.remoteIds[index] as number);
      const [here, there] = [inBlock(plan.local, to), inBlock(rank, from)];
      const piece: Piece = {
        offset: here.offset,
        lengthBytes: to.lengthBytes,
        prefillRank: read.remoteRank,
        prefillStage: read.remotePpRank,
        remoteBlock: there.block,
        remoteOffset: there.offset,
      };
      const before = blocks.get(here.block);
      if (before === undefined) blocks.set(here.block, [piece]);
      else before.push(piece);
    }
  }
  return found;
}

function inBlock(rank: RankGeometry, { region, from }: MemoryPlace): { block: number; offset: number } {
  const strideBytes = rank.regions[region]?.blockStrideBytes ?? 1;
  const block = Math.floor(from / strideBytes);
  return { block, offset: from - block * strideBytes };
}
