import { KvError } from "@kv/interface";
import { type CanonicalLayer, proveCanonical, type RankGeometry } from "@kv/plan";
import type { Pair } from "../input/pair.js";

/** Sizes of TP that engines of one fleet have. */
const TP_SIZES = [1, 2, 4, 8];
const ORDERS: Readonly<Record<string, CanonicalLayer["order"]>> = { LBHNC: "HND", LBNHC: "NHD" };

/**
 * What vLLM 0.33's offloading tiers keep of a block of the first layer, and which TP sizes can
 * share it: a sentence, or none where a block is not one layer's heads and tokens.
 */
export function tierPages(pair: Pair): readonly string[] {
  const [prefill, decode] = [pair.prefill[0], pair.decode[0]];
  const region = prefill?.regions[0];
  const kind = pair.groups[region?.groupId ?? -1];
  if (prefill === undefined || decode === undefined || region === undefined) return [];
  if (kind === undefined || !["full", "swa", "mla"].includes(kind)) return [];
  if (prefill.packedMembers !== undefined || (prefill.dcpSize ?? 1) > 1) return [];

  const isLatent = region.replicated ?? kind === "mla";
  const numKvHeads = isLatent ? 1 : (region.numKvHeads ?? pair.numKvHeads);
  const heads = Math.max(1, numKvHeads / prefill.tpSize);
  const pageBytes = (region.blockLengthBytes * numKvHeads) / heads;
  const sizes = [...new Set([...TP_SIZES, prefill.tpSize, decode.tpSize])];
  sizes.sort((one, other) => one - other);
  const layerOf = ({ kernelBlockSize, layout }: RankGeometry, tpSize: number) => {
    const order = ORDERS[layout];
    if (order === undefined)
      throw new KvError("KV_PLAN_UNSUPPORTED", `a block of the layout ${layout} has no page`);
    return {
      form: isLatent ? "latent" : "packed",
      order,
      numKvHeads,
      blockSize: kernelBlockSize,
      // The bytes of a head and token stay together, so that two stand for all.
      headBytes: 2,
      tpSize,
    } as const;
  };
  try {
    for (const writer of sizes)
      for (const reader of sizes) proveCanonical(layerOf(prefill, writer), layerOf(decode, reader));
  } catch (error) {
    if (!KvError.is(error) || error.code === "KV_INTERNAL") throw error;
    return [`not shared: ${error.message}`];
  }
  return [
    `${pageBytes} bytes of a block and layer; TP ${sizes.join(", ")} write and read them, each byte once`,
  ];
}
