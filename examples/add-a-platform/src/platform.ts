import { KvError, type Platform, type PlatformWarning } from "@kv/interface";
import { createBrickStaging } from "./staging.js";

export function brickPlatform(): Platform {
  return {
    deviceType: "brick",
    capabilities: { registersAs: [], bufferDevices: ["cpu"], maxConcurrentBatches: 1 },
    kvCacheShape: ({ numBlocks, numKvHeads, blockSize, headSize }) => [
      numBlocks,
      numKvHeads,
      blockSize,
      2 * headSize,
    ],
    maxModelLen({ max_position_embeddings: length }) {
      if (typeof length === "number" && Number.isSafeInteger(length) && length > 0) return length;
      throw new KvError(
        "KV_CONFIG_INVALID",
        `max_position_embeddings is ${JSON.stringify(length)}, not a positive integer`,
      );
    },
    check({ prefixCaching, maxNumSeqs }) {
      if (prefixCaching === true) {
        throw new KvError(
          "KV_PLATFORM_UNSUPPORTED",
          "prefixCaching is true, but brick's kernels cannot skip computed tokens",
          {
            hint: "turn prefix caching off",
          },
        );
      }
      const warnings: PlatformWarning[] = [];
      if (maxNumSeqs !== undefined && maxNumSeqs > 1) {
        warnings.push({
          setting: "maxNumSeqs",
          message: `maxNumSeqs is ${maxNumSeqs}; brick runs one sequence at a time`,
        });
      }
      return warnings;
    },
    createStaging: createBrickStaging,
  };
}

export default brickPlatform;
