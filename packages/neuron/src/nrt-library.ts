import { existsSync } from "node:fs";
import { KvError } from "@kv/interface";

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
