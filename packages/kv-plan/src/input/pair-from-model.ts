import { type KvCacheKind, KvError } from "@kv/interface";
import type { RankGeometry, RegionGeometry, StateSpaceGeometry } from "@kv/plan";
import {
  type CacheSpec,
  cellBytes,
  type MambaSpec,
  pageBytes,
  stateBytes,
} from "../model/cache-spec.js";
import { unscaledKeyBytes } from "../model/families/latents.js";
import {
  bucketsBy,
  type CacheGroup,
  isBlockOutermost,
  type LayerCache,
} from "../model/kv-cache-groups.js";
import { type CacheTensor, placeCaches } from "../model/kv-cache-tensors.js";
import { type RefusalReport, refusalReport } from "../report/report.js";
import { suggestSizes } from "../report/suggestions.js";
import type { EngineFlags } from "./engine-flags.js";
import { type Engine, enginesOf } from "./engine-settings.js";
import { type ModelSource, requireEqualModels } from "./model-source.js";
import { type Pair, placeRegions } from "./pair.js";
import { stagesOfLayers } from "./pipeline-stages.js";

interface PairOfEnginesOptions {
  readonly title: string;
  readonly prefill: Engine;
  readonly decode: Engine;
  readonly assumed: readonly string[];
}

type PlacelessRegion = Omit<RegionGeometry, "baseAddress">;

/**
 * Lays out caches as vLLM allocates and registers them.
 * @throws `KV_PLAN_INCOMPATIBLE` when the two models' caches differ, `KV_PLAN_UNSUPPORTED`.
 */
function pairOfEngines(options: PairOfEnginesOptions): Pair {
  const { prefill, decode } = options;
  requireEqualModels(prefill.caches, decode.caches);
  requireHandedOver(options.title, decode);
  const { groups } = decode.caches;
  requireEqualGroups(prefill.caches.groups, groups);
  requireScaledStates(prefill, decode);
  const assumed = new Set([
    ...prefill.caches.assumed,
    ...decode.caches.assumed,
    ...options.assumed,
  ]);
  const laidOut = [prefill, decode].map((engine) => ({ engine, regions: regionsOf(engine) }));
  const isShared = laidOut.some(({ regions }) => regions.some(({ groupId }) => groupId === -1));
  const kinds = groups.map((group) => `${group.layers.length} ${kindOf(group)}`).join(", ");
  if (prefill.ppSize > 1 || decode.ppSize > 1) {
    if (isShared) refuseSharedStages(kinds);
    assumed.add(
      "layers are dealt out to pipeline stages evenly, as vLLM does (no VLLM_PP_LAYER_PARTITION)",
    );
  }
  if (groups.length > 1)
    assumed.add(
      `layers are grouped as vLLM groups them (${kinds})${isShared ? ", and groups share their regions" : ""}`,
    );
  for (const { layers } of groups) for (const note of notesOf(layers[0]?.spec)) assumed.add(note);
  assumed.add("one region per page of a block, addresses made up");
  const heads = groups.map(headsOfGroup);
  return {
    title: options.title,
    numKvHeads: decode.caches.numKvHeads,
    groups: groups.map(kindOf),
    ...(heads.some((count) => count !== decode.caches.numKvHeads) ? { groupKvHeads: heads } : {}),
    cacheDtype:
      decode.caches.cacheDtype === "auto" ? decode.caches.modelDtype : decode.caches.cacheDtype,
    windowTokens: groups.map(({ layers: [first] }) =>
      first?.spec.class === "MambaSpec" ? undefined : first?.spec.slidingWindow,
    ),
    prefill: ranksOf(prefill, laidOut[0]?.regions ?? []),
    decode: ranksOf(decode, laidOut[1]?.regions ?? []),
    assumed: [...assumed],
    caches: [prefill.caches, decode.caches],
  };
}

function notesOf(spec: CacheSpec | undefined): readonly string[] {
  if (spec?.class === "MambaSpec")
    return [
      "states lie in the pages of attention, channels outermost (VLLM_SSM_CONV_STATE_LAYOUT=DS, which vLLM's connector asks for)",
      ...(spec.mambaType === "SHORT_CONV"
        ? [
            "vLLM's own connector does not hand over states of short convolutions; that of this project does",
          ]
        : []),
    ];
  if (spec?.class === "ChunkedLocalAttentionSpec")
    return [
      `layers with chunks of ${spec.attentionChunkSize} tokens hand over all their blocks, as vLLM's connector does`,
    ];
  return [];
}

/** The connector clips only sliding windows. */
export function kindOf({ layers }: CacheGroup): KvCacheKind {
  const classes = new Set(layers.map(({ spec }) => spec.class));
  if (classes.has("MambaSpec")) return "mamba";
  if (classes.has("SlidingWindowMLASpec")) return "swa-mla";
  if (classes.has("SlidingWindowSpec")) return "swa";
  return classes.size === 1 && classes.has("MLAAttentionSpec") ? "mla" : "full";
}

/** Returns KV heads of the whole model; 1 for latents and states. */
function headsOfGroup({ layers }: CacheGroup): number {
  return Math.max(1, ...layers.map(({ spec }) => modelHeads(spec)));
}

function modelHeads(spec: CacheSpec): number {
  return spec.class === "MambaSpec" ? 1 : (spec.modelKvHeads ?? 1);
}

function requireHandedOver(title: string, { caches }: Engine): void {
  if (caches.notHandedOver !== undefined)
    throw new KvError("KV_PLAN_UNSUPPORTED", `${title}: ${caches.notHandedOver}`, {
      hint: "serve such a model with engines that prefill and decode",
    });
  if (caches.layers.length === 0)
    throw new KvError("KV_PLAN_UNSUPPORTED", `${title}: no layer of the model has a KV cache`);
}

function requireEqualGroups(prefill: readonly CacheGroup[], decode: readonly CacheGroup[]): void {
  const names = (groups: readonly CacheGroup[]) =>
    groups.map(({ layers }) => layers.map(({ name }) => name).join()).join(";");
  if (names(prefill) === names(decode)) return;
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `vLLM groups the layers otherwise on the two engines: ${prefill.length} and ${decode.length} groups, because the pages of their caches differ`,
    { hint: "use one TP size, one cache dtype, one block size and one layout on both sides" },
  );
}

/**
 * With fewer projection groups than ranks, ranks hold replicas, so no state is a share of another.
 */
function requireScaledStates(prefill: Engine, decode: Engine): void {
  const [one, other] = [stateOf(prefill), stateOf(decode)];
  if (one === undefined || other === undefined) return;
  const whole = (state: MambaSpec, { tpSize }: Engine) => (stateBytes(state)[0] ?? 0) * tpSize;
  if (whole(one, prefill) === whole(other, decode)) return;
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `the groups of a state's projections B and C do not divide over TP sizes ${prefill.tpSize} and ${decode.tpSize}: ranks hold replicas of them`,
    {
      hint: "use one TP size on both sides",
      details: { prefillTp: prefill.tpSize, decodeTp: decode.tpSize },
    },
  );
}

function stateOf({ caches }: Engine): MambaSpec | undefined {
  for (const { spec } of caches.layers) if (spec.class === "MambaSpec") return spec;
  return undefined;
}

/**
 * A region for a layer of each group serves other layers on a stage than on a rank with all layers.
 */
function refuseSharedStages(kinds: string): never {
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `groups of layers share regions (${kinds}), which are other ones on a pipeline stage than on an engine without stages`,
    { hint: "leave --pp out, or describe the regions in a file (--file)" },
  );
}

function ranksOf(engine: Engine, regions: readonly PlacelessRegion[]): RankGeometry[] {
  const { caches, ppSize, tpSize, kernelBlockSize } = engine;
  const { blockSize } = caches;
  const stageOfLayer = stagesOfLayers(caches.numLayers, ppSize);
  const stageOf = new Map(caches.layers.map(({ name, layer }) => [name, stageOfLayer[layer]]));
  const state = stateOf(engine);
  const tokens = caches.groups.map((group) => group.blockSize);
  const packed = packedMembers(engine);
  return Array.from({ length: ppSize * tpSize }, (_, index) => {
    const [ppRank, tpRank] = [Math.floor(index / tpSize), index % tpSize];
    return placeRegions({
      tpRank,
      tpSize,
      kernelBlockSize,
      deviceId: tpRank,
      physicalBlocksPerLogical: blockSize / kernelBlockSize,
      layout: caches.layout,
      attentionBackend: engine.attentionBackend,
      ...(ppSize === 1 ? {} : { ppRank, ppSize }),
      regions: ppSize === 1 ? regions : regions.filter(({ name }) => stageOf.get(name) === ppRank),
      ...(tokens.some((count) => count !== blockSize) ? { groupBlockTokens: tokens } : {}),
      ...(packed === undefined ? {} : { packedMembers: packed }),
      stateSpace: state && stateGeometry(state),
    });
  });
}

/**
 * As vLLM's `derive_mamba_conv_split`: x of Mamba 1; x, B and C of Mamba 2; Q, K and V of a delta
 * net.
 */
function stateGeometry(state: MambaSpec): StateSpaceGeometry {
  const [convBytes = 0, recurrentBytes = 0] = stateBytes(state);
  const [[rows = 0, channels = 0] = [], [heads = 0, rowSize = 0] = []] = state.shapes;
  const bytesOf = (count: number) => (convBytes / (rows * channels)) * rows * count;
  // Heads' own channels: x of Mamba 2, V of a delta net. The rest is two projections of one size.
  const own = heads * rowSize;
  const rest = (channels - own) / 2;
  const split =
    state.mambaType === "MAMBA2"
      ? [own, rest, rest]
      : state.mambaType === "GDN_ATTN"
        ? [rest, rest, own]
        : [channels];
  return {
    convProjectionBytes: split.filter((count) => count > 0).map(bytesOf),
    convBytes,
    recurrentBytes,
  };
}

interface PlacedLayer {
  readonly layer: LayerCache;
  readonly offsetBytes: number;
  readonly tensor: CacheTensor;
}

function placedLayers({ caches, numBlocks }: Engine): readonly PlacedLayer[] {
  return placeCaches(caches, numBlocks).flatMap((tensor) =>
    tensor.layers.map((layer, index) => ({
      layer,
      tensor,
      offsetBytes: tensor.offsetBytes + index * tensor.layerStrideBytes,
    })),
  );
}

/** Rows hold all layers' pages and are registered whole, as for latents, which every rank has. */
function isPacked(engine: Engine): boolean {
  const { layout, numKvHeads } = engine.caches;
  return isBlockOutermost(layout) && numKvHeads === 1 && stateOf(engine) === undefined;
}

function packedMembers(engine: Engine): RankGeometry["packedMembers"] {
  if (!isPacked(engine)) return undefined;
  return Object.fromEntries(
    placedLayers(engine).map(({ layer, offsetBytes }) => [
      layer.name,
      { offsetBytes, lengthBytes: pageBytes(layer.spec) },
    ]),
  );
}

/**
 * As vLLM's connector registers them: a region per address at which a cache begins, in the order of
 * layer names.
 */
function regionsOf(engine: Engine): readonly PlacelessRegion[] {
  const { caches, kernelBlockSize, numBlocks } = engine;
  const perLogical = caches.blockSize / kernelBlockSize;
  const common = { numBlocks: numBlocks * perLogical, memoryType: "VRAM" as const };
  if (isPacked(engine)) {
    const rowBytes = caches.bytesPerBlock / perLogical;
    const members = caches.layers.map(({ name }) => name);
    return [
      {
        ...common,
        name: members[0] ?? "row",
        ...(caches.groups.length === 1 ? { groupId: 0 } : { groupId: -1 }),
        blockLengthBytes: rowBytes,
        blockStrideBytes: rowBytes,
        members,
        replicated: true,
      },
    ];
  }
  const byAddress = bucketsBy(placedLayers(engine), ({ offsetBytes }) => offsetBytes);
  const regions = [...byAddress.values()].map((placed): PlacelessRegion => {
    const sorted = [...placed].sort((one, other) => compareNames(one.layer.name, other.layer.name));
    const [first] = sorted as [PlacedLayer, ...PlacedLayer[]];
    const groups = [...new Set(placed.map(({ tensor }) => tensor.group))].sort(
      (one, other) => one - other,
    );
    const isOne = groups.length === 1;
    return {
      ...common,
      name: first.layer.name,
      blockLengthBytes: pageBytes(first.layer.spec) / perLogical,
      blockStrideBytes: first.tensor.blockStrideBytes / perLogical,
      groupId: isOne ? first.tensor.group : -1,
      ...(isOne || groups.length === caches.groups.length ? {} : { groupIds: groups }),
      ...headsAndCells(engine, sorted),
    };
  });
  return regions.sort((one, other) => compareNames(one.name, other.name));
}

/** How a region differs from its group: heads, replicas, and cells that do not fill its blocks. */
function headsAndCells(
  { caches }: Engine,
  placed: readonly PlacedLayer[],
): Pick<RegionGeometry, "numKvHeads" | "replicated" | "cellBytes"> {
  const heads = new Set(placed.map(({ layer }) => modelHeads(layer.spec)));
  const [{ layer, tensor } = {}] = placed;
  const spec = layer?.spec;
  if (spec === undefined || placed.some((one) => one.layer.spec.class === "MambaSpec")) return {};
  const isLatent = spec.class === "MLAAttentionSpec" || spec.class === "SlidingWindowMLASpec";
  const kind = kindOf(caches.groups[tensor?.group ?? 0] as CacheGroup);
  const [count = 1] = heads;
  return {
    ...(isLatent && kind === "full" ? { replicated: true } : {}),
    ...(!isLatent && heads.size === 1 && count !== caches.numKvHeads ? { numKvHeads: count } : {}),
    // An indexer's block holds all scales after the last key.
    ...("role" in spec && spec.role === "indexer" && spec.dtype === "uint8"
      ? { cellBytes: unscaledKeyBytes(cellBytes(spec)) }
      : {}),
  };
}

/** vLLM's order of regions: numbers in names count as numbers. */
function compareNames(one: string, other: string): number {
  const [a, b] = [one.split(/(\d+)/), other.split(/(\d+)/)];
  for (const [index, part] of a.entries()) {
    const theirs = b[index];
    if (theirs === undefined) return 1;
    if (part === theirs) continue;
    const [x, y] = [Number(part), Number(theirs)];
    return index % 2 === 1 ? x - y : part < theirs ? -1 : 1;
  }
  return a.length - b.length;
}

/**
 * The pair of two models, prefill's first.
 * @throws `KV_CONFIG_INVALID`, `KV_PLAN_*`.
 */
export function pairOfModels(
  models: readonly [ModelSource, ModelSource],
  flags: EngineFlags,
): Pair {
  const assumed: string[] = [];
  const [prefill, decode] = enginesOf(flags, assumed, models);
  const [prefillModel, decodeModel] = models;
  const names = [...new Set([prefillModel.name, decodeModel.name])].join(" / ");
  return {
    ...pairOfEngines({
      title: `${names}: prefill ${sizesOf(prefill)} → decode ${sizesOf(decode)}`,
      prefill,
      decode,
      assumed,
    }),
    plannedFrom: [...new Set([prefillModel.plannedFrom, decodeModel.plannedFrom])].join("; "),
    changed: (other) => pairOfModels(models, { ...flags, ...other }),
  };
}

/**
 * The pair, or a refusal of an unknown model or of a TP size, with sizes that would work. `models`
 * may throw.
 * @throws `KV_CONFIG_INVALID`, other `KV_PLAN_*`.
 */
export function pairOrRefusal(
  title: string,
  models: () => readonly [ModelSource, ModelSource],
  flags: EngineFlags,
): Pair | RefusalReport {
  let known: readonly [ModelSource, ModelSource] | undefined;
  try {
    known = models();
    return pairOfModels(known, flags);
  } catch (error) {
    if (!KvError.is(error) || error.code !== "KV_PLAN_UNSUPPORTED") throw error;
    // No TP size works for an unknown model.
    const understood = known;
    const wouldWork =
      understood === undefined
        ? []
        : suggestSizes(flags.tp, (tp) => pairOfModels(understood, { ...flags, tp }));
    return refusalReport(title, error, { wouldWork, assumed: [] });
  }
}

function sizesOf({ tpSize, ppSize }: Engine): string {
  return ppSize === 1 ? `TP ${tpSize}` : `TP ${tpSize}, PP ${ppSize}`;
}
