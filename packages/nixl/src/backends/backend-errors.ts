import { type BackendSpec, KvError } from "@kv/interface";
import type { Environment } from "../library/find-library.js";
import { nameOfMissing } from "../library/missing-parts.js";
import { describePlugins, type PluginDescription, summaryOf } from "./plugins.js";

export interface Unavailable {
  readonly wanted: readonly BackendSpec[];
  /** Who asked for them. */
  readonly source: string;
  readonly libraryPath: string;
  readonly environment: Environment;
}

/** An agent's `KV_BACKEND_UNAVAILABLE` with what a person needs: every plugin found, what each lacks, and the remedy. Other errors pass. */
export async function explainUnavailable(error: unknown, about: Unavailable): Promise<unknown> {
  if (!KvError.is(error, "KV_BACKEND_UNAVAILABLE")) return error;
  const { wanted, source, libraryPath, environment } = about;
  const plugins = await describePlugins({ libraryPath, environment }).catch(() => [] as PluginDescription[]);
  if (plugins.length === 0) return error;
  const found = `plugins of ${libraryPath}: ${plugins.map(summaryOf).join("; ")}`;
  const details = { plugins, source };
  for (const { name } of wanted) {
    const plugin = plugins.find((entry) => entry.name === name);
    if (plugin === undefined) {
      return new KvError(
        "KV_BACKEND_UNAVAILABLE",
        `backend ${name}, asked for by ${source}, has no plugin; ${found}`,
        {
          hint: `ask for one of ${plugins
            .filter(({ loads }) => loads)
            .map((entry) => entry.name)
            .join(", ")}, or name another folder of plugins by NIXL_PLUGIN_DIR`,
          details,
          cause: error,
        },
      );
    }
    if (plugin.loads) continue;
    return new KvError(
      "KV_BACKEND_UNAVAILABLE",
      `backend ${name}, asked for by ${source}, does not load: it lacks ${plugin.missing.map(nameOfMissing).join(", ")}; ${found}`,
      { ...(plugin.remedy === undefined ? {} : { hint: plugin.remedy }), details, cause: error },
    );
  }
  return new KvError("KV_BACKEND_UNAVAILABLE", `${error.message} (asked for by ${source}); ${found}`, {
    ...(error.hint === undefined ? {} : { hint: error.hint }),
    details,
    cause: error,
  });
}
