import {
  type KvCacheConfig,
  type KvCacheRegion,
  type KvCacheShapeOptions,
  type KvCaches,
  KvError,
} from "@kv/interface";
import type { NeuronDevice } from "./device.js";

/** Bytes of one number, by the names that vLLM gives types. */
const BYTES_OF_TYPE: Readonly<Record<string, number>> = {
  "torch.float32": 4,
  "torch.float16": 2,
  "torch.bfloat16": 2,
  "torch.float8_e4m3fn": 1,
  "torch.float8_e5m2": 1,
  "torch.uint8": 1,
  fp8: 1,
  fp8_e4m3: 1,
  fp8_e5m2: 1,
};

/** Bytes of the K or the V of one head and token. Errors: `KV_PLATFORM_UNSUPPORTED` for a type that is not known. */
export function rowLengthBytes({ dtype, cacheDtype, headSize }: KvCacheConfig): number {
  const type = cacheDtype === "auto" ? dtype : cacheDtype;
  const bytes = BYTES_OF_TYPE[type] ?? BYTES_OF_TYPE[`torch.${type}`];
  if (bytes !== undefined) return bytes * headSize;
  throw new KvError(
    "KV_PLATFORM_UNSUPPORTED",
    `a KV cache of type ${type}; known are ${Object.keys(BYTES_OF_TYPE).join(", ")}`,
  );
}

const PLANES = [".key", ".value"] as const;

/** Dimensions of a layer's cache: K of all blocks, then V. */
export function neuronCacheShape(shape: KvCacheShapeOptions): readonly [2, number, number, number, number] {
  return [2, shape.numBlocks, shape.numKvHeads, shape.blockSize, shape.headSize];
}

/** K and V of one layer, which lie apart on the device. */
export interface LayerPlanes {
  /** As peers know it. */
  readonly name: string;
  readonly key: KvCacheRegion;
  readonly value: KvCacheRegion;
}

/**
 * A rank's cache on a device, in one allocation, of shape `[2, numBlocks, heads, blockSize, headSize]` per layer: K of all blocks, then V. As caches
 * it has two regions a layer, named `<layer>.key` and `<layer>.value`. `config` is what peers see.
 */
export function neuronCaches(options: {
  readonly device: NeuronDevice;
  readonly config: KvCacheConfig;
  readonly numBlocks: number;
  /** KV heads of this rank. */
  readonly numHeads: number;
}): KvCaches {
  const { device, config, numBlocks, numHeads } = options;
  requirePlainGroups(config);
  const { blockSize, headSize } = config;
  const [, blocks, heads, tokens] = neuronCacheShape({
    numBlocks,
    numKvHeads: numHeads,
    blockSize,
    headSize,
  });
  const blockLengthBytes = heads * tokens * rowLengthBytes(config);
  const planeBytes = blocks * blockLengthBytes;
  const layers = config.groups.reduce((count, { layerNames }) => count + layerNames.length, 0);
  const memory = device.allocate(layers * 2 * planeBytes);
  let planes = 0;
  const regions = config.groups.flatMap(({ layerNames }, groupId) =>
    layerNames.flatMap((layer) => {
      return PLANES.map(
        (plane): KvCacheRegion => ({
          name: layer + plane,
          memory,
          offsetBytes: planeBytes * planes++,
          numBlocks,
          blockLengthBytes,
          blockStrideBytes: blockLengthBytes,
          groupId,
          memoryType: memory.memoryType,
        }),
      );
    }),
  );
  return { config, regions };
}

/** The layers of caches with K and V apart. Errors: `KV_PLATFORM_UNSUPPORTED` for any other caches, saying what is wrong. */
export function layersOf({ config, regions }: KvCaches): LayerPlanes[] {
  requirePlainGroups(config);
  const rowBytes = rowLengthBytes(config);
  const layers: LayerPlanes[] = [];
  for (let at = 0; at < regions.length; at += 2) {
    const [key, value] = [regions[at], regions[at + 1]];
    const name = key?.name.slice(0, -PLANES[0].length) ?? "";
    const apart = key?.name === name + PLANES[0] && value?.name === name + PLANES[1];
    if (key === undefined || value === undefined || !apart) {
      throw new KvError(
        "KV_PLATFORM_UNSUPPORTED",
        `regions ${key?.name} and ${value?.name} are not K and V of one layer`,
        { hint: "name them <layer>.key and <layer>.value, one after the other; neuronCaches() does" },
      );
    }
    const { blockLengthBytes, numBlocks } = key;
    const equal = value.blockLengthBytes === blockLengthBytes && value.numBlocks === numBlocks;
    if (!equal || blockLengthBytes % (rowBytes * config.blockSize) !== 0) {
      throw new KvError(
        "KV_PLATFORM_UNSUPPORTED",
        `layer ${name}: K blocks of ${blockLengthBytes} bytes and V blocks of ${value.blockLengthBytes} are not ${config.blockSize} tokens of whole heads of ${rowBytes} bytes each`,
      );
    }
    layers.push({ name, key, value });
  }
  return layers;
}

function requirePlainGroups({ groups, physicalBlocksPerLogical, layout }: KvCacheConfig): void {
  const other = groups.find(({ kind }) => kind !== "full" && kind !== "swa");
  if (other === undefined && physicalBlocksPerLogical === 1 && layout === "LBHNC") return;
  throw new KvError(
    "KV_PLATFORM_UNSUPPORTED",
    `Neuron stages attention with K and V in layout LBHNC and one kernel block per block; this cache is ${other?.kind ?? "full"}, ${layout}, ${physicalBlocksPerLogical} kernel blocks per block`,
  );
}
