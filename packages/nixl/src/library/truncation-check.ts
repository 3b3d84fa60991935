import { join } from "node:path";
import { type BackendSpec, KvError, type KvErrorCode } from "@kv/interface";
import { pluginFolder } from "../backends/plugins.js";
import { shortageOf } from "./elf-file.js";
import type { Environment } from "./find-library.js";
import { howToReinstall } from "./reinstall-hint.js";

/**
 * Refuses a library or a plugin that is cut off, such as by a disk that was full: to load it would end the process. Errors:
 * `KV_LIBRARY_INCOMPATIBLE`, `KV_BACKEND_UNAVAILABLE`. What is missing or no library at all is left to the loader, which says so.
 */
export async function requireWhole(
  libraryPath: string,
  backends: readonly BackendSpec[],
  environment: Environment,
): Promise<void> {
  const hint = howToReinstall(libraryPath, environment);
  await requireFile(libraryPath, "NIXL's library", "KV_LIBRARY_INCOMPATIBLE", hint);
  for (const { name } of backends) {
    const plugin = join(pluginFolder(libraryPath, environment), `libplugin_${name}.so`);
    await requireFile(plugin, `the plugin of backend ${name}`, "KV_BACKEND_UNAVAILABLE", hint);
  }
}

async function requireFile(path: string, what: string, code: KvErrorCode, hint: string): Promise<void> {
  const shortage = await shortageOf(path).catch(() => undefined);
  if (shortage === undefined) return;
  const { wanted, found } = shortage;
  throw new KvError(code, `${what} is cut off: ${path} has ${found} bytes, and needs ${wanted} at least`, {
    hint,
    details: { path, ...shortage },
  });
}
