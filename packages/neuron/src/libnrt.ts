import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";
import { KvError } from "@kv/interface";

export interface NrtAddon {
  /** Loads the library and initialises the runtime, once in a process at a time. */
  open(libraryPath: string): object;
  close(runtime: object): void;
  readonly Tensor: new (
    runtime: object,
    lengthBytes: number,
    logicalCore: number,
    name: string,
  ) => NrtTensor;
  describe(libraryPath: string): DescribedLibrary;
}

export interface DescribedLibrary {
  readonly path: string;
  readonly symbols: Readonly<Record<string, boolean>>;
}

export interface NrtTensor {
  /**
   * Copies between `buffer` and the tensor's runs `[offsetBytes, lengthBytes]`, on libuv's thread
   * pool.
   */
  copy(write: boolean, runs: Float64Array, buffer: ArrayBuffer): Promise<ArrayBuffer | undefined>;
  close(): void;
}

/** @throws `KV_ADDON_NOT_FOUND`, with the path and the cause. */
export function loadNrtAddon(): NrtAddon {
  const platform = `${process.platform}-${process.arch}`;
  const path = fileURLToPath(new URL(`../native/${platform}/kv_neuron.node`, import.meta.url));
  try {
    return createRequire(import.meta.url)(path) as NrtAddon;
  } catch (cause) {
    throw new KvError(
      "KV_ADDON_NOT_FOUND",
      `the addon of @kv/neuron does not load on ${platform}: ${path}`,
      {
        hint: "Linux on x64 or arm64 with glibc 2.28 or newer only; in the repository: node native/build.mjs",
        cause,
      },
    );
  }
}

/** In AWS's packages, where the loader does not look. */
const AWS_PATH = "/opt/aws/neuron/lib/libnrt.so.1";

/** What to try for libnrt, in order: only `KV_NRT_LIBRARY` where it is set. */
export function nrtLibraryPaths(
  env: Readonly<Record<string, string | undefined>> = process.env,
): readonly string[] {
  const named = env["KV_NRT_LIBRARY"];
  return named === undefined || named === "" ? ["libnrt.so.1", AWS_PATH] : [named];
}

/**
 * Calls `attempt` with each path until one has a library.
 * @throws The errors of `attempt` for a library that exists but does not work; `KV_STAGING_FAILED`
 * with every path that was tried.
 */
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
      // The loader's words for a missing library; other errors concern an existing one.
      if (!message.startsWith(`${path}: cannot open shared object file`)) throw error;
      tried.push(message);
    }
  }
  throw new KvError(
    "KV_STAGING_FAILED",
    `the Neuron runtime is not found; tried ${tried.join("; ")}`,
    {
      hint: "install aws-neuronx-runtime-lib, or set KV_NRT_LIBRARY to the path of libnrt.so.1",
      details: { tried },
    },
  );
}
