import { readdirSync } from "node:fs";
import { availableParallelism } from "node:os";
import { KvError, type Platform, readMaxModelLen } from "@kv/interface";

/**
 * Host memory, registered without staging. The cache shape is vLLM's for CPUs: the last dimension
 * packs K and V.
 */
export function cpuPlatform(): Platform {
  return {
    deviceType: "cpu",
    capabilities: { registersAs: ["DRAM"], bufferDevices: ["cpu"], maxConcurrentBatches: 2 },
    kvCacheShape: ({ numBlocks, numKvHeads, blockSize, headSize }) => [
      numBlocks,
      numKvHeads,
      blockSize,
      2 * headSize,
    ],
    maxModelLen: readMaxModelLen,
    check: () => [],
  };
}

/** Options of `cudaPlatform`. */
export interface CudaPlatformOptions {
  /** Names of usable GPUs. @default those of the driver's files in `/dev` */
  readonly gpus?: readonly string[] | undefined;
}

/**
 * An NVIDIA GPU with its cache in registered GPU memory (`kv_buffer_device: "cuda"`, memory type
 * VRAM) and vLLM's cache shape. The transport must support VRAM.
 * @throws `KV_PLATFORM_UNSUPPORTED` without a GPU, with the devices that the machine has.
 */
export function cudaPlatform({ gpus = nvidiaGpus() }: CudaPlatformOptions = {}): Platform {
  if (gpus.length === 0) {
    const others = namesIn("/dev").filter((name) => OTHER_DEVICES.test(name));
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      `kv_buffer_device "cuda" needs a GPU: there is no /dev/nvidia0. This machine has ${availableParallelism()} CPU cores and ${
        others.length === 0
          ? "no other accelerator"
          : others.map((name) => `/dev/${name}`).join(", ")
      }`,
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

/** AWS Neuron, AMD, Intel Gaudi, Google TPU. */
const OTHER_DEVICES = /^(neuron\d+|kfd|accel\d*|vfio)$/;

const nvidiaGpus = (): readonly string[] =>
  namesIn("/dev").filter((name) => /^nvidia\d+$/.test(name));

function namesIn(folder: string): readonly string[] {
  try {
    return readdirSync(folder);
  } catch {
    return [];
  }
}
