import { readdirSync } from "node:fs";
import { KvError, type Platform } from "@kv/interface";
import { cpuPlatform } from "./cpu-platform.js";

/** Options of `cudaPlatform`. */
export interface CudaPlatformOptions {
  /** Names of the GPUs that are here; by default those of the driver's files in `/dev`. */
  readonly gpus?: () => readonly string[];
}

/**
 * An NVIDIA GPU: the cache is in its memory, and that is registered (`kv_buffer_device: "cuda"`, memory type VRAM), so that a peer's staging pool is
 * read straight into it. The transport must register such memory, and the engine bring it. The shape is vLLM's. Errors: `KV_PLATFORM_UNSUPPORTED`
 * where there is no GPU.
 */
export function cudaPlatform({ gpus = gpusHere }: CudaPlatformOptions = {}): Platform {
  if (gpus().length === 0) {
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      'kv_buffer_device "cuda" needs a GPU: there is no /dev/nvidia0',
      {
        hint: 'use "cpu" for kv_buffer_device, or install the NVIDIA driver (in a container: --gpus all)',
      },
    );
  }
  return {
    ...cpuPlatform(),
    deviceType: "cuda",
    capabilities: { registersAs: ["VRAM"], bufferDevices: ["cuda"], maxConcurrentBatches: 2 },
  };
}

function gpusHere(): readonly string[] {
  try {
    return readdirSync("/dev").filter((name) => /^nvidia\d+$/.test(name));
  } catch {
    return [];
  }
}
