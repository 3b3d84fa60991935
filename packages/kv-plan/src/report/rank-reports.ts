import { KvError } from "@kv/interface";
import type {
  EngineTransferPlan,
  ModelGeometry,
  RankGeometry,
  RequestBlocks,
  RequestPlan,
} from "@kv/plan";
import { descriptorLookup, type MemoryPlace, neededTokens, passByBlock } from "@kv/plan/prove";
import { checkedSide, vllmLimitOf } from "@kv/plan/vllm";
import type { Pair } from "../input/pair.js";
import { byStage, placeOf } from "../input/pipeline-stages.js";
import { type CacheSpec, pageBytes, specKey, unpaddedPageBytes } from "../model/cache-spec.js";
import { bucketsBy } from "../model/kv-cache-groups.js";
import type { ModelCaches } from "../model/model-caches.js";
import type { BlockReport, CacheReport, KindReport, RankReport, StageReport } from "./report.js";

/** @throws `KV_INTERNAL` for a rank that is not in the pair. */
export function prefillRank(
  pair: Pick<Pair, "prefill">,
  { remoteRank, remotePpRank }: { readonly remoteRank: number; readonly remotePpRank: number },
): RankGeometry {
  const found = pair.prefill.find(
    (rank) => rank.tpRank === remoteRank && placeOf(rank).ppRank === remotePpRank,
  );
  if (found !== undefined) return found;
  throw new KvError(
    "KV_INTERNAL",
    `the plan reads rank ${remoteRank} of stage ${remotePpRank}, which is not in the pair`,
  );
}

export function stageReports(
  pair: Pair,
  plans: readonly EngineTransferPlan[],
  ranks: readonly RankReport[],
): readonly StageReport[] {
  const names = pair.decode[0]?.regions.map(({ name }) => name) ?? [];
  const holds = (stage: number, region: number) =>
    plans.some(({ sources, segments }) =>
      sources.some(
        (source) =>
          source.remotePpRank === stage &&
          source.segments.some((index) => segments[index]?.region === region),
      ),
    );
  return [...byStage(pair.prefill).keys()].map((stage): StageReport => {
    const reads = ranks.flatMap((rank) =>
      rank.reads.flatMap(({ prefillStage, prefillRank: from }) =>
        prefillStage === stage ? [{ from, by: rank.decodeRank }] : [],
      ),
    );
    const ascending = (numbers: readonly number[]) => [...new Set(numbers)].sort((a, b) => a - b);
    return {
      stage,
      regions: names.filter((_, region) => holds(stage, region)),
      read: ascending(reads.map(({ from }) => from)),
      readers: ascending(reads.map(({ by }) => by)),
    };
  });
}

/**
 * Why vLLM's decode worker (0.33) refuses a pair with a plan, by the table of vLLM's checks. Its
 * handshake counts each rank's regions.
 */
export function refusedByVllm(pair: Pair): readonly string[] {
  const stages = byStage(pair.prefill).length;
  if (stages > 1)
    return [
      `prefill has ${stages} pipeline stages: the handshake ends with "Number of KV layers must match between prefill and decode" (0.33); a decode worker of @kv/pull reads them`,
    ];
  const [prefill, decode] = [pair.prefill[0], pair.decode[0]];
  if (prefill === undefined || decode === undefined) return [];
  const limit = vllmLimitOf(
    {
      local: checkedSide(decode),
      remote: checkedSide(prefill),
      model: pair,
      hasStates: decode.stateSpace !== undefined,
      mode: "pull",
      checking: "decode",
    },
    "0.33.0",
  );
  return limit === undefined ? [] : [`${limit.text} (0.33): ${limit.fix}`];
}

export function cacheReports({ groups }: ModelCaches): readonly CacheReport[] {
  return groups.flatMap(({ layers }, group) =>
    [...bucketsBy(layers, ({ spec }) => specKey(spec)).values()].map((same) =>
      cacheReport(group, same.length, same[0]?.spec as CacheSpec),
    ),
  );
}

function cacheReport(group: number, layers: number, spec: CacheSpec): CacheReport {
  const isState = spec.class === "MambaSpec";
  return {
    group,
    layers,
    class: spec.class,
    blockTokens: spec.blockSize,
    pageBytes: pageBytes(spec),
    usedBytes: unpaddedPageBytes(spec),
    numKvHeads: isState ? null : spec.numKvHeads,
    headSize: isState ? null : spec.headSize,
    headSizeV: isState ? null : spec.headSizeV,
    windowTokens: isState ? null : (spec.slidingWindow ?? spec.attentionChunkSize ?? null),
    shapes: isState ? spec.shapes : null,
    dtypes: isState ? spec.dtypes : [spec.dtype],
  };
}

/** The largest share of the request first. `blocks`: the sample request's. */
export function kindReports(
  caches: readonly CacheReport[],
  blocks: RequestBlocks,
): readonly KindReport[] {
  const kinds = new Map<string, KindReport>();
  for (const cache of caches) {
    const name = nameOf(cache);
    const bytes = cache.layers * cache.usedBytes;
    const before = kinds.get(name) ?? { name, layers: 0, blockBytes: 0, requestBytes: 0 };
    kinds.set(name, {
      name,
      layers: before.layers + cache.layers,
      blockBytes: before.blockBytes + bytes,
      requestBytes: before.requestBytes + bytes * (blocks.localBlockIds[cache.group]?.length ?? 0),
    });
  }
  return [...kinds.values()].sort((one, other) => other.requestBytes - one.requestBytes);
}

/** Unknown classes keep their own name. */
function nameOf({ class: kind, windowTokens, headSize, dtypes }: CacheReport): string {
  const window = windowTokens === null ? "" : ` of ${windowTokens} tokens`;
  switch (kind) {
    case "FullAttentionSpec":
      return "full attention";
    case "SlidingWindowSpec":
      return `windows${window}`;
    case "ChunkedLocalAttentionSpec":
      return `chunks${window}`;
    case "MLAAttentionSpec":
      return `latents of ${headSize} ${dtypes[0] === "uint8" ? "bytes" : "elements"}`;
    case "SlidingWindowMLASpec":
      return `latents in windows${window}`;
    case "MambaSpec":
      return "states";
    default:
      return kind;
  }
}

/** The most blocks in a report per rank and group. */
const BLOCKS_SHOWN = 48;

type Piece = BlockReport["pieces"][number];

/** In each group's first region on each pipeline stage. */
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
    // A state has no heads and tokens to show; the table of reads has its pieces.
    if (plan.groupPlans[group]?.unit !== "kernel-block" || remotes.length === 0) continue;
    const demand = neededTokens(
      group,
      plan.local,
      remotes,
      { ...model, groups: plan.groups },
      blocks,
    );
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
  const found = new Map(
    [...regions].map((region) => [region, new Map<number, Piece[]>()] as const),
  );
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

function inBlock(
  rank: RankGeometry,
  { region, from }: MemoryPlace,
): { block: number; offset: number } {
  const strideBytes = rank.regions[region]?.blockStrideBytes ?? 1;
  const block = Math.floor(from / strideBytes);
  return { block, offset: from - block * strideBytes };
}
