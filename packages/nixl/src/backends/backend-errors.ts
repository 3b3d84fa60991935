import { type BackendSpec, KvError } from "@kv/interface";
import type { Environment } from "../environment.js";
import { realLibrary } from "../library/cache-folder.js";
import { reinstallHint, wholeWheelHint } from "../library/library-package.js";
import { missingParts, nameOfMissing } from "../library/missing-parts.js";
import { backendTraits, variablesSet } from "./backend-traits.js";
import { describePlugins, type PluginDescription, remedyFor, summaryOf } from "./plugins.js";
import { isEfaOnly, type RdmaDevice } from "./rdma-devices.js";
import { networkObstacles, ucxObstacles } from "./ucx-obstacles.js";

export interface FailedStart {
  readonly backends: readonly BackendSpec[];
  /** The setting that selected them, such as `NIXL_BACKEND`. */
  readonly source: string;
  readonly libraryPath: string;
  readonly environment: Environment;
}

/**
 * Adds to `KV_BACKEND_UNAVAILABLE` every plugin, what each lacks and the remedy, and to
 * `KV_LIBRARY_INCOMPATIBLE` what the library lacks. Returns other errors unchanged.
 */
export async function explainBackendError(error: unknown, start: FailedStart): Promise<unknown> {
  if (KvError.is(error, "KV_LIBRARY_INCOMPATIBLE")) return explainRefusedLibrary(error, start);
  if (!KvError.is(error, "KV_BACKEND_UNAVAILABLE")) return error;
  const { backends, source, libraryPath, environment } = start;
  const plugins = await describePlugins({ libraryPath, environment }).catch(
    () => [] as PluginDescription[],
  );
  if (plugins.length === 0) return error;
  const found = `plugins of ${libraryPath}: ${plugins.map(summaryOf).join("; ")}`;
  const explained = (message: string, hint: string | undefined) =>
    new KvError("KV_BACKEND_UNAVAILABLE", `${message}; ${found}`, {
      hint,
      details: { plugins, source },
      cause: error,
    });
  for (const { name } of backends) {
    const plugin = plugins.find((entry) => entry.name === name);
    if (plugin === undefined) {
      const loadable = plugins.filter(({ loads }) => loads).map((entry) => entry.name);
      return explained(
        `backend ${name}, selected by ${source}, has no plugin`,
        wholeWheelHint(libraryPath) ??
          `ask for one of ${loadable.join(", ")}, or set NIXL_PLUGIN_DIR to another folder of plugins`,
      );
    }
    if (plugin.loads) continue;
    const missing = plugin.missing.map(nameOfMissing).join(", ");
    return explained(
      `backend ${name}, selected by ${source}, does not load: it lacks ${missing}`,
      plugin.remedy,
    );
  }
  const obstacles = backends.flatMap(({ name }) => {
    if (name === "UCX") return ucxObstacles(environment.UCX_TLS);
    return name === "LIBFABRIC" ? networkObstacles() : [];
  });
  if (obstacles.length > 0) {
    const reasons = obstacles.map(({ reason }) => reason).join("; ");
    const fixes = obstacles.map(({ fix }) => fix).join("; ");
    return explained(`${error.message} (selected by ${source}): ${reasons}`, fixes);
  }
  const set = backends.flatMap(({ name }) =>
    variablesSet(environment, backendTraits(name).restrictedBy),
  );
  if (set.length === 0) return explained(`${error.message} (selected by ${source})`, error.hint);
  const values = set.map((name) => `${name}=${environment[name]}`).join(", ");
  return explained(
    `${error.message} (selected by ${source}), with ${values}`,
    `these variables may leave no route: name transports and devices that this machine has, or unset ${set.join(" and ")}; ${error.hint ?? ""}`,
  );
}

/** The loader names only the first missing library, and not how to get it. */
async function explainRefusedLibrary(error: KvError, start: FailedStart): Promise<KvError> {
  const { libraryPath, environment } = start;
  const missing = await missingParts(realLibrary(libraryPath), { environment });
  if (missing.length === 0 || missing.some(({ kind }) => kind === "file")) return error;
  const reinstall = reinstallHint(libraryPath, environment);
  return new KvError(
    "KV_LIBRARY_INCOMPATIBLE",
    `NIXL does not load on this machine: ${libraryPath} lacks ${missing.map(nameOfMissing).join(", ")}`,
    {
      hint: remedyFor("NIXL", missing, { hasDependencies: true, reinstall }),
      details: { missing },
      cause: error,
    },
  );
}

export interface RefusedPeer {
  readonly backends: readonly BackendSpec[];
  readonly environment: Environment;
  readonly devices: readonly Pick<RdmaDevice, "name" | "efa">[];
}

/**
 * Adds why NIXL may have refused a peer's metadata: UCX on a host with EFA alone, or variables that
 * leave no route. Returns other errors unchanged.
 */
export function explainRefusedPeer(
  error: unknown,
  { backends, environment, devices }: RefusedPeer,
): unknown {
  if (!KvError.is(error, "KV_AGENT_METADATA_INVALID") || !error.message.startsWith("NIXL refused"))
    return error;
  const explained = (reason: string, hint: string) =>
    new KvError("KV_AGENT_METADATA_INVALID", `${error.message}; ${reason}`, {
      hint: error.hint === undefined ? hint : `${hint}; ${error.hint}`,
      details: error.details,
      cause: error,
    });
  if (isEfaOnly(devices) && backends.every(({ name }) => name === "UCX")) {
    const names = devices.map(({ name }) => name).join(", ");
    return explained(
      `EFA (${names}) is the only fabric of this host, and UCX has no transport for it`,
      "set NIXL_BACKEND=LIBFABRIC, or backends in kv_connector_extra_config, on both sides",
    );
  }
  const set = backends.flatMap(({ name }) =>
    variablesSet(environment, backendTraits(name).restrictedBy),
  );
  if (set.length === 0) return error;
  return explained(
    `here ${set.map((name) => `${name}=${environment[name]}`).join(", ")} may leave no route to it`,
    `let both sides use a transport and a network in common, or unset ${set.join(" and ")}`,
  );
}
