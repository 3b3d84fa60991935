import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";
import { KvError } from "@kv/interface";

/** The addon's surface. */
export interface NrtAddon {
  /** Loads the library and initialises the runtime; once per process while it is open. */
  open(libraryPath: string): object;
  close(runtime: object): void;
  readonly Tensor: new (runtime: object, lengthBytes: number, logicalCore: number, name: string) => NrtTensor;
  /** Which file the loader takes, and which of the calls that are made it has. Initialises nothing. */
  describe(libraryPath: string): {
    readonly path: string;
    readonly symbols: Readonly<Record<string, boolean>>;
  };
}

export interface NrtTensor {
  copy(write: boolean, runs: Float64Array, buffer: ArrayBuffer): Promise<ArrayBuffer | undefined>;
  close(): void;
}

/** Errors: `KV_ADDON_NOT_FOUND`, with the path that was tried and why. */
export function loadNrtAddon(): NrtAddon {
  const platform = `${process.platform}-${process.arch}`;
  const path = fileURLToPath(new URL(`../native/${platform}/kv_neuron.node`, import.meta.url));
  try {
    return createRequire(import.meta.url)(path) as NrtAddon;
  } catch (cause) {
    throw new KvError("KV_ADDON_NOT_FOUND", `the addon of @kv/neuron does not load on ${platform}: ${path}`, {
      hint: "Linux on x64 only; in the repository: node native/build.mjs",
      cause,
    });
  }
}
