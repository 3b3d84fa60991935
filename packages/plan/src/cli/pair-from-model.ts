import { KvError } from "@kv/interface";
import type { RankGeometry, RegionGeometry } from "../geometry.js";
import { groupLayers, type LayerGroup, type ModelShape } from "./model-shape.js";
import type { EngineSettings, Pair } from "./pair.js";
import { placeRegions } from "./place-regions.js";

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
  const [mine, theirs] = [groupLayers(decodeModel.layers), groupLayers(prefillModel.layers)];
  requireEqualModels(prefillModel, decodeModel);
  const assumed = [...new Set([...prefillModel.assumed, ...decodeModel.assumed, ...options.assumed])];
  if (mine.length > 1) {
    const kinds = mine.map((group) => `${group.layers.length} ${group.kind}`).join(", ");
    assumed.push(`layers are grouped as vLLM groups them (${kinds}), and groups share their regions`);
  }
  assumed.push("one region per layer with K and V packed, blocks without padding, addresses made up");
  return {
    title: options.title,
    numKvHeads: decodeModel.numKvHeads,
    groups: mine.map((group) => group.kind),
    windowTokens: mine.map((group) => group.layers[0]?.windowTokens),
    prefill: ranks(theirs, options.prefill),
    decode: ranks(mine, options.decode),
    assumed,
  };
}

function ranks(groups: readonly LayerGroup[], settings: EngineSettings): RankGeometry[] {
  const regions = regionsOf(groups, settings);
  return Array.from({ length: settings.tpSize }, (_, tpRank) =>
    placeRegions({
      tpRank,
      tpSize: settings.tpSize,
      kernelBlockSize: settings.kernelBlockSize,
      physicalBlocksPerLogical: settings.blockSize / settings.kernelBlockSize,
      layout: settings.layout,
      attentionBackend: settings.attentionBackend,
      deviceId: tpRank,
      regions,
    }),
  );
}

function regionsOf(
  groups: readonly LayerGroup[],
  settings: EngineSettings,
): Omit<RegionGeometry, "baseAddress">[] {
  const most = Math.max(...groups.map((group) => group.layers.length));
  const perLogical = settings.blockSize / settings.kernelBlockSize;
  return Array.from({ length: most }, (_, index) => {
    const layers = groups.map((group) => group.layers[index]);
    const lengths = layers.flatMap((layer) => {
      if (layer === undefined) return [];
      const heads = layer.kind === "mla" ? 1 : Math.max(1, layer.numKvHeads / settings.tpSize);
      return [heads * settings.kernelBlockSize * layer.bytesPerHeadAndToken];
    });
    const [first = 0, ...others] = lengths;
    if (others.some((length) => length !== first)) {
      throw new KvError(
        "KV_PLAN_UNSUPPORTED",
        `groups that share regions need blocks of one length; those of region ${index} have ${[...new Set(lengths)].join(" and ")} bytes`,
        { hint: "describe the regions in a file (--file), or ask two live engines (--from)" },
      );
    }
    return {
      name: layers.find((layer) => layer !== undefined)?.name ?? `region ${index}`,
      numBlocks: settings.numBlocks * perLogical,
      blockLengthBytes: first,
      blockStrideBytes: first,
      groupId: groups.length === 1 ? 0 : -1,
      memoryType: settings.memoryType,
    };
  });
}

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
