import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

/** Device memory of a CUDA driver; see `native/fake/cuda/memory_addon.cc`. */
export interface CudaMemory {
  /** Loads and initialises the driver; returns the number of devices. */
  open(driver: string): number;
  allocate(device: number, lengthBytes: number): bigint;
  free(pointer: bigint): void;
  write(pointer: bigint, bytes: Uint8Array): void;
  read(pointer: bigint, lengthBytes: number): Uint8Array;
  /** Splits an allocation; the second piece belongs to another device. Only in the fake driver. */
  split(pointer: bigint, firstBytes: number, deviceOfRest: number): void;
}

const built = (name: string) => fileURLToPath(new URL(`../../../../native/build/${name}`, import.meta.url));

/** A fake driver with two devices of host memory. */
export const FAKE_CUDA = built("libfake_cuda.so");
const ADDON = built("kv_cuda_memory.node");

/** Why tests with the fake driver cannot run; undefined when they can. With CI=true the reason is an error. */
export const cudaMemoryMissing: string | undefined =
  existsSync(ADDON) && existsSync(FAKE_CUDA) ? undefined : "run: node native/build.mjs";
if (cudaMemoryMissing !== undefined && process.env.CI === "true")
  throw new Error(`${ADDON} is missing; ${cudaMemoryMissing}`);

export const cudaMemory = (): CudaMemory => createRequire(import.meta.url)(ADDON) as CudaMemory;
