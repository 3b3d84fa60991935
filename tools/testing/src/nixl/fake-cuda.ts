import { createRequire } from "node:module";
import { join } from "node:path";
import { unbuilt } from "./fake-nixl.js";

const FAKE_CUDA = join(import.meta.dirname, "../../../../native/build/fake_cuda.node");

export const fakeCudaMissing = unbuilt(FAKE_CUDA);

export interface FakeCuda {
  /** The second piece belongs to another device. */
  split(address: number, firstBytes: number, deviceOfRest: number): void;
}

/** In the place of CUDA's driver: two devices of host memory. */
export const loadFakeCuda = (): FakeCuda => createRequire(import.meta.url)(FAKE_CUDA) as FakeCuda;
