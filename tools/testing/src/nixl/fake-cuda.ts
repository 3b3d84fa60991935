import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const FAKE_CUDA = fileURLToPath(
  new URL("../../../../native/build/fake_cuda.node", import.meta.url),
);

/** Why tests with it cannot run. With CI=true the reason is an error. */
export const fakeCudaMissing: string | undefined = existsSync(FAKE_CUDA)
  ? undefined
  : "run: node native/build.mjs";
if (fakeCudaMissing !== undefined && process.env.CI === "true")
  throw new Error(`${FAKE_CUDA} is missing; ${fakeCudaMissing}`);

export interface FakeCuda {
  /** Splits an allocation; the second piece belongs to another device. */
  split(address: number, firstBytes: number, deviceOfRest: number): void;
}

/** Puts a fake of CUDA's driver in the place of the real one: two devices of host memory. */
export const loadFakeCuda = (): FakeCuda => createRequire(import.meta.url)(FAKE_CUDA) as FakeCuda;
