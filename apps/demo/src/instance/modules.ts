import { importFrom } from "@kv/connector";
import { KvError, type Log, type Platform, type Transport } from "@kv/interface";
import { type CacheKind, registerCacheKind } from "@kv/plan";

/**
 * Opens the transport of a module, whose default export is a function `({ log }) => Transport`.
 * `specifier`: a package installed in the working directory, a path, or a `file:` URL.
 * @throws `KV_CONFIG_INVALID`, and those of the function.
 */
export async function openTransport(
  specifier: string,
  options: { readonly log: Log },
): Promise<Transport> {
  return made(specifier, await (await factoryIn(specifier, "Transport"))(options), "Transport", [
    "createAgent",
    "allocate",
    "close",
  ]);
}

/**
 * Creates the platform of a module, whose default export is a function `({ log }) => Platform`.
 * @throws As `openTransport`.
 */
export async function createPlatform(
  specifier: string,
  options: { readonly log: Log },
): Promise<Platform> {
  return made(specifier, await (await factoryIn(specifier, "Platform"))(options), "Platform", [
    "kvCacheShape",
    "maxModelLen",
    "check",
  ]);
}

/**
 * Adds the kind of cache that a module exports by default to this process's plans, and returns its
 * name.
 * @throws `KV_CONFIG_INVALID`, `KV_PLAN_INVALID`.
 */
export async function addCacheKind(specifier: string): Promise<string> {
  const kind = await defaultExport(specifier);
  if (typeof kind !== "object" || kind === null)
    throw invalid(specifier, "its default export is no CacheKind");
  registerCacheKind(kind as CacheKind);
  return (kind as CacheKind).name;
}

async function factoryIn(
  specifier: string,
  what: string,
): Promise<(options: { log: Log }) => unknown> {
  const exported = await defaultExport(specifier);
  if (typeof exported === "function") return exported as (options: { log: Log }) => unknown;
  throw invalid(specifier, `its default export is no function that returns a ${what}`);
}

function made<T>(specifier: string, value: unknown, what: string, methods: readonly string[]): T {
  const lacking = methods.filter(
    (name) => typeof (value as Record<string, unknown> | null)?.[name] !== "function",
  );
  if (lacking.length === 0) return value as T;
  throw invalid(
    specifier,
    `what its default export returns is no ${what}: it lacks ${lacking.join(", ")}`,
  );
}

async function defaultExport(specifier: string): Promise<unknown> {
  try {
    return ((await importFrom(specifier, process.cwd())) as { default?: unknown }).default;
  } catch (cause) {
    throw invalid(
      specifier,
      `it could not be loaded: ${cause instanceof Error ? cause.message : String(cause)}`,
      cause,
    );
  }
}

function invalid(specifier: string, reason: string, cause?: unknown): KvError {
  return new KvError("KV_CONFIG_INVALID", `module ${specifier}: ${reason}`, {
    cause,
    hint: `a module is a package installed in ${process.cwd()}, an absolute path of compiled JavaScript, or a file: URL`,
  });
}
