import { existsSync } from "node:fs";
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

/** Where AWS's packages put the Neuron runtime, which the loader does not search by itself. */
const AWS_PATH = "/opt/aws/neuron/lib/libnrt.so.1";

/** Paths or names under which the runtime's library is looked for, in order: what `KV_NRT_LIBRARY` says and nothing else, or the usual places. */
export function nrtLibraryPaths(
  env: Readonly<Record<string, string | undefined>> = process.env,
): readonly string[] {
  const named = env["KV_NRT_LIBRARY"];
  return named === undefined || named === "" ? ["libnrt.so.1", AWS_PATH] : [named];
}

/** The answer of `attempt` for the first path where a library is. Errors: what `attempt` throws; `KV_STAGING_FAILED` with every path that was tried. */
export function withNrtLibrary<T>(paths: readonly string[], attempt: (path: string) => T): T {
  const tried: string[] = [];
  for (const path of paths) {
    if (path.startsWith("/") && !existsSync(path)) {
      tried.push(`${path}: no such file`);
      continue;
    }
    try {
      return attempt(path);
    } catch (error) {
      const message = error instanceof Error ? error.message : String(error);
      // The loader's word for a library that it does not find; of one that is there it says more.
      if (!message.startsWith(`${path}: cannot open shared object file`)) throw error;
      tried.push(message);
    }
  }
  throw new KvError("KV_STAGING_FAILED", `the Neuron runtime is not found; tried ${tried.join("; ")}`, {
    hint: "install aws-neuronx-runtime-lib, or set KV_NRT_LIBRARY to the path of libnrt.so.1",
    details: { tried },
  });
}
