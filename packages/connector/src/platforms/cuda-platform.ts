import { readdirSync } from "node:fs";
import { KvError, type Platform } from "@kv/interface";
import { cpuPlatform } from "./cpu-platform.js";

/** Options of `cudaPlatform`. */
export interface CudaPlatformOptions {
  /** Returns the names of the host's GPUs. @default the names of the driver's files in `/dev` */
  readonly gpus?: () => readonly string[];
}

/**
 * An NVIDIA GPU. The cache is in GPU memory, which is registered directly (`kv_buffer_device: "cuda"`, memory type VRAM), so that transfers from
 * a peer's staging pool go straight into it. The transport must support this memory, and the engine must allocate it. The cache shape is
 * vLLM's. Errors: `KV_PLATFORM_UNSUPPORTED` without a GPU.
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
