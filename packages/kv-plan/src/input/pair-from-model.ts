import { KvError } from "@kv/interface";
import type { RankGeometry, RegionGeometry } from "@kv/plan";
import {
  groupLayers,
  type LayerGroup,
  type LayerShape,
  layersByShape,
  type ModelShape,
} from "./model-shape.js";
import type { EngineSettings, Pair } from "./pair.js";
import { placeRegions } from "./pair.js";
import { stagesOfLayers } from "./pipeline-stages.js";
import { hybridBlockTokens, KERNEL_TOKENS, stateOfRank, tokenBytes } from "./state-pages.js";

export interface PairFromModelOptions {
  readonly title: string;
  readonly prefillModel: ModelShape;
  readonly decodeModel: ModelShape;
  readonly prefill: EngineSettings;
  readonly decode: EngineSettings;
  readonly assumed: readonly string[];
}

/**
 * Lays out the caches of both engines from the shapes of their models. Errors: `KV_PLAN_INCOMPATIBLE` when the two models' caches differ,
 * `KV_PLAN_INVALID`, `KV_PLAN_UNSUPPORTED`.
 */
export function pairFromModels(options: PairFromModelOptions): Pair {
  const { prefillModel, decodeModel } = options;
  requireEqualModels(prefillModel, decodeModel);
  const assumed = [...new Set([...prefillModel.assumed, ...decodeModel.assumed, ...options.assumed])];
  const sides = [options.prefill, options.decode];
  // Pages of unlike sizes cannot serve two groups in turn; and what does not fit on one engine is not shared on the other either.
  const shared = sides.every((settings) => sharesPages(decodeModel.layers, settings));
  const groups = shared ? groupLayers(decodeModel.layers) : layersByShape(decodeModel.layers);
  const layOut = shared ? sharedRegions : ownRegions;
  const stages = ({ ppSize }: EngineSettings) => stagesOfLayers(decodeModel.numLayers, ppSize);
  if (sides.some(({ ppSize }) => ppSize > 1)) {
    if (shared) refuseSharedStages(groups);
    assumed.push("layers are dealt out to pipeline stages evenly, as vLLM does (no VLLM_PP_LAYER_PARTITION)");
  }
  if (groups.length > 1) {
    const kinds = groups.map((group) => `${group.layers.length} ${group.kind}`).join(", ");
    assumed.push(
      shared
        ? `layers are grouped as vLLM groups them (${kinds}), and groups share their regions`
        : `layers of one kind and shape are a group (${kinds}), and each has a region of its own`,
    );
  }
  if (decodeModel.layers.some(({ state }) => state !== undefined))
    assumed.push("states lie in the pages of attention; no prefix caching but with --computed");
  assumed.push("one region per layer with K and V packed, blocks without padding, addresses made up");
  return {
    title: options.title,
    numKvHeads: decodeModel.numKvHeads,
    groups: groups.map((group) => group.kind),
    cacheDtype: decodeModel.cacheDtype,
    windowTokens: groups.map((group) => group.layers[0]?.windowTokens),
    prefill: ranks(groups, options.prefill, layOut, stages(options.prefill)),
    decode: ranks(groups, options.decode, layOut, stages(options.decode)),
    assumed,
    // The least block that holds a state is another one for each TP size: what the settings say holds for these sizes only.
    ...(decodeModel.layers.some(({ state }) => state !== undefined)
      ? {}
      : {
          withTp: (side: "prefill" | "decode", tpSize: number) =>
            pairFromModels({ ...options, [side]: { ...options[side], tpSize } }),
        }),
  };
}

type LayOut = (
  groups: readonly LayerGroup[],
  settings: EngineSettings,
) => Pick<RankGeometry, "groupBlockTokens"> & { readonly regions: readonly PlacelessRegion[] };

type PlacelessRegion = Omit<RegionGeometry, "baseAddress">;

function ranks(
  groups: readonly LayerGroup[],
  settings: EngineSettings,
  layOut: LayOut,
  stageOfLayer: readonly number[],
): RankGeometry[] {
  const { ppSize } = settings;
  const laidOut = layOut(groups, settings);
  const layers = groups.flatMap((group) => group.layers);
  const stageOf = new Map(layers.map(({ name, layer }) => [name, stageOfLayer[layer]]));
  const state = layers.find((layer) => layer.state !== undefined)?.state;
  return Array.from({ length: ppSize * settings.tpSize }, (_, index) => {
    const [ppRank, tpRank] = [Math.floor(index / settings.tpSize), index % settings.tpSize];
    const staged =
      ppSize === 1
        ? laidOut
        : {
            ...laidOut,
            ppRank,
            ppSize,
            regions: laidOut.regions.filter(({ name }) => stageOf.get(name) === ppRank),
          };
    return placeRegions({
      tpRank,
      tpSize: settings.tpSize,
      kernelBlockSize: settings.kernelBlockSize,
      physicalBlocksPerLogical: settings.blockSize / settings.kernelBlockSize,
      layout: settings.layout,
      attentionBackend: settings.attentionBackend,
      deviceId: tpRank,
      ...staged,
      stateSpace: state && stateOfRank(state, settings.tpSize),
    });
  });
}

/** A region that serves a layer of each group serves others on a stage than on a rank that has all layers. */
function refuseSharedStages(groups: readonly LayerGroup[]): never {
  const kinds = groups.map((group) => `${group.layers.length} ${group.kind}`).join(", ");
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `groups of layers share regions (${kinds}), which are other ones on a pipeline stage than on an engine without stages`,
    { hint: "leave --pp out, or describe the regions in a file (--file)" },
  );
}

/** Bytes of a kernel block of so many tokens; of a compressed cache fewer cells than tokens. */
function blockBytes(layer: LayerShape, tokens: number, { tpSize }: EngineSettings): number {
  return (tokens / (layer.tokensPerCell ?? 1)) * tokenBytes(layer, tpSize);
}

/** One page serves a layer of each group, where all attention's pages are as large, and a state fits into one. */
function sharesPages(layers: readonly LayerShape[], settings: EngineSettings): boolean {
  if (layersByShape(layers).length === 1) return false;
  if (
    layers.some(({ blockTokens, tokensPerCell }) => blockTokens !== undefined || tokensPerCell !== undefined)
  )
    return false;
  const pages = layers.flatMap((layer) =>
    layer.state === undefined ? [blockBytes(layer, settings.blockSize, settings)] : [],
  );
  const [page = 0] = pages;
  for (const { state } of layers) {
    if (state === undefined) continue;
    const { convBytes, recurrentBytes } = stateOfRank(state, settings.tpSize);
    if (convBytes + recurrentBytes <= page) continue;
    throw new KvError(
      "KV_PLAN_INVALID",
      `a state of ${convBytes} + ${recurrentBytes} bytes does not fit into a page of ${page} bytes (--block-size ${settings.blockSize}, TP ${settings.tpSize})`,
      {
        hint: `the least --block-size that fits is ${hybridBlockTokens(layers, settings.tpSize, KERNEL_TOKENS)} with --kernel-block-size ${KERNEL_TOKENS}; without the two each TP size has its least`,
      },
    );
  }
  return pages.every((bytes) => bytes === page);
}

const sharedRegions: LayOut = (groups, settings) => {
  const most = Math.max(...groups.map((group) => group.layers.length));
  const attention = groups.find((group) => group.kind !== "mamba")?.layers[0];
  const lengthBytes = attention === undefined ? 0 : blockBytes(attention, settings.kernelBlockSize, settings);
  const regions = Array.from({ length: most }, (_, index): PlacelessRegion => {
    const layers = groups.flatMap((group) => group.layers[index] ?? []);
    const holders = [...groups.keys()].filter((group) => groups[group]?.layers[index] !== undefined);
    return {
      name: layers[0]?.name ?? `region ${index}`,
      numBlocks: (settings.numBlocks * settings.blockSize) / settings.kernelBlockSize,
      blockLengthBytes: lengthBytes,
      blockStrideBytes: lengthBytes,
      groupId: -1,
      ...(holders.length < groups.length ? { groupIds: holders } : {}),
      memoryType: settings.memoryType,
    };
  });
  return { regions };
};

/** A region for each layer; groups whose tokens take less have more of them in a block, where that makes blocks of one size. */
const ownRegions: LayOut = (groups, settings) => {
  const { blockSize, kernelBlockSize } = settings;
  const perLogical = blockSize / kernelBlockSize;
  const perToken = groups.map(({ layers: [first] }) =>
    first === undefined || first.blockTokens !== undefined ? undefined : blockBytes(first, 1, settings),
  );
  const largest = Math.max(...perToken.map((bytes) => bytes ?? 0));
  const tokens = groups.map(({ layers: [first] }, group) => {
    const times = largest / (perToken[group] ?? largest);
    const alike = first?.tokensPerCell === undefined && Number.isInteger(times) ? times : 1;
    return first?.blockTokens ?? blockSize * alike;
  });
  const regions = groups.flatMap(({ layers, kind }, group) =>
    layers.map((layer): PlacelessRegion => {
      const lengthBytes = blockBytes(layer, (tokens[group] as number) / perLogical, settings);
      if (!Number.isInteger(lengthBytes)) {
        throw new KvError(
          "KV_PLAN_INVALID",
          `${layer.name}: a block of ${tokens[group]} tokens does not divide into cells of ${layer.tokensPerCell ?? 1} tokens`,
          { hint: "give a --block-size that does" },
        );
      }
      return {
        name: layer.name,
        numBlocks: settings.numBlocks * perLogical,
        blockLengthBytes: lengthBytes,
        blockStrideBytes: lengthBytes,
        groupId: group,
        memoryType: settings.memoryType,
        ...(kind === "full" || kind === "swa" ? { numKvHeads: layer.numKvHeads } : {}),
        ...(layer.unscaledBytes === undefined ? {} : { cellBytes: layer.unscaledBytes }),
      };
    }),
  );
  return {
    regions,
    ...(tokens.some((count) => count !== blockSize) ? { groupBlockTokens: tokens } : {}),
  };
};

function requireEqualModels(prefill: ModelShape, decode: ModelShape): void {
  const facts = (model: ModelShape) => ({
    "KV heads": model.numKvHeads,
    "layers with a cache": model.layers.length,
    "kinds of the layers": model.layers.map((layer) => layer.kind).join(" "),
    "bytes of a head and token": model.layers.map((layer) => layer.bytesPerHeadAndToken).join(" "),
  });
  const [one, other] = [facts(prefill), facts(decode)];
  for (const key of Object.keys(one) as (keyof typeof one)[]) {
    if (one[key] === other[key]) continue;
    const short = (value: string | number) =>
      String(value).length > 60 ? `${String(value).slice(0, 60)}…` : value;
    throw new KvError(
      "KV_PLAN_INCOMPATIBLE",
      `the two models differ in ${key}: prefill ${short(one[key])}, decode ${short(other[key])}`,
      {
        hint: "both engines must run one model with one --kv-cache-dtype",
        details: { what: key, prefill: one[key], decode: other[key] },
      },
    );
  }
}
