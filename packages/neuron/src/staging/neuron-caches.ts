import {
  type KvCacheConfig,
  type KvCacheRegion,
  type KvCacheShapeOptions,
  type KvCaches,
  KvError,
} from "@kv/interface";
import type { NeuronDevice } from "../device/device.js";

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

/**
 * Bytes of the K, or the V, of one head and token.
 * @throws `KV_PLATFORM_UNSUPPORTED` for an unknown type.
 */
export function rowLengthBytes({ dtype, cacheDtype, headSize }: KvCacheConfig): number {
  const type = cacheDtype === "auto" ? dtype : cacheDtype;
  const bytes = BYTES_OF_TYPE[type] ?? BYTES_OF_TYPE[`torch.${type}`];
  if (bytes !== undefined) return bytes * headSize;
  throw new KvError(
    "KV_PLATFORM_UNSUPPORTED",
    `unsupported KV cache type ${type}; supported are ${Object.keys(BYTES_OF_TYPE).join(", ")}`,
  );
}

const PLANES = [".key", ".value"] as const;

/** One layer's shape: K of all blocks, then V. */
export function neuronCacheShape(
  shape: KvCacheShapeOptions,
): readonly [2, number, number, number, number] {
  return [2, shape.numBlocks, shape.numKvHeads, shape.blockSize, shape.headSize];
}

/** A layer's K and V on the device. */
export interface LayerPlanes {
  readonly name: string;
  readonly key: KvCacheRegion;
  readonly value: KvCacheRegion;
}

/**
 * Allocates a rank's cache in device memory, which the device owns. A layer has the shape
 * `[2, numBlocks, heads, blockSize of its group, headSize]` and the regions `<layer>.key` and
 * `<layer>.value`.
 * @throws `KV_PLATFORM_UNSUPPORTED` for a cache that Neuron cannot stage, `KV_MEMORY_INVALID`,
 * `KV_STAGING_FAILED` from the runtime.
 */
export function neuronCaches(options: {
  readonly device: NeuronDevice;
  readonly config: KvCacheConfig;
  readonly numBlocks: number;
  readonly numHeads: number;
}): KvCaches {
  const { device, config, numBlocks, numHeads } = options;
  requireStageable(config);
  const blockLengths = blockTokens(config).map((blockSize) => {
    const shape = { numBlocks, numKvHeads: numHeads, blockSize, headSize: config.headSize };
    const [, , heads, tokens] = neuronCacheShape(shape);
    return heads * tokens * rowLengthBytes(config);
  });
  let length = 0;
  const planes = config.groups.flatMap(({ layerNames }, groupId) =>
    layerNames.flatMap((layer) => {
      return PLANES.map((plane) => {
        const blockLengthBytes = blockLengths[groupId] ?? 0;
        const offsetBytes = length;
        length += numBlocks * blockLengthBytes;
        const blocks = { numBlocks, blockLengthBytes, blockStrideBytes: blockLengthBytes, groupId };
        return { name: layer + plane, offsetBytes, ...blocks };
      });
    }),
  );
  const memory = device.allocate(length);
  const regions = planes.map(
    (plane): KvCacheRegion => ({ ...plane, memory, memoryType: memory.memoryType }),
  );
  return { config, regions };
}

/**
 * Pairs a device cache's regions by layer.
 * @throws `KV_PLATFORM_UNSUPPORTED` for caches that do not have a K and a V region for each layer.
 */
export function deviceLayers({ config, regions }: KvCaches): LayerPlanes[] {
  requireStageable(config);
  const rowBytes = rowLengthBytes(config);
  const tokens = blockTokens(config);
  const layers: LayerPlanes[] = [];
  for (let at = 0; at < regions.length; at += 2) {
    const [key, value] = [regions[at], regions[at + 1]];
    const name = key?.name.slice(0, -PLANES[0].length) ?? "";
    const isPair = key?.name === name + PLANES[0] && value?.name === name + PLANES[1];
    if (key === undefined || value === undefined || !isPair) {
      throw new KvError(
        "KV_PLATFORM_UNSUPPORTED",
        `regions ${key?.name} and ${value?.name} are not K and V of one layer`,
        {
          hint: "name them <layer>.key and <layer>.value, one after the other; neuronCaches() does",
        },
      );
    }
    const { blockLengthBytes, numBlocks } = key;
    const groupTokens = tokens[key.groupId];
    const group = config.groups.findIndex(({ layerNames }) => layerNames.includes(name));
    const named = new Set([key.groupId, value.groupId, ...(group < 0 ? [] : [group])]);
    if (
      groupTokens === undefined ||
      named.size > 1 ||
      (key.groupIds ?? value.groupIds) !== undefined
    ) {
      throw new KvError(
        "KV_PLATFORM_UNSUPPORTED",
        `layer ${name}: its regions and the KV cache's groups name the groups ${[...named].join(", ")}; Neuron stages no region that groups share`,
        { hint: "give the layers of each group regions of their own; neuronCaches() does" },
      );
    }
    const equal = value.blockLengthBytes === blockLengthBytes && value.numBlocks === numBlocks;
    if (!equal || blockLengthBytes % (rowBytes * groupTokens) !== 0) {
      throw new KvError(
        "KV_PLATFORM_UNSUPPORTED",
        `layer ${name}: K blocks of ${blockLengthBytes} bytes and V blocks of ${value.blockLengthBytes} are not a whole number of heads with ${groupTokens} tokens of ${rowBytes} bytes each`,
      );
    }
    layers.push({ name, key, value });
  }
  return layers;
}

function blockTokens({ groups, blockSize }: KvCacheConfig): readonly number[] {
  return groups.map((group) => group.blockSize ?? blockSize);
}

function requireStageable({ groups, physicalBlocksPerLogical, layout }: KvCacheConfig): void {
  const other = groups.find(({ kind }) => kind !== "full" && kind !== "swa");
  if (other === undefined && physicalBlocksPerLogical === 1 && layout === "LBHNC") return;
  throw new KvError(
    "KV_PLATFORM_UNSUPPORTED",
    `Neuron stages full and sliding-window attention in layout LBHNC with one kernel block per block; this cache has ${other?.kind ?? "full"}, ${layout}, ${physicalBlocksPerLogical} kernel blocks per block`,
  );
}
