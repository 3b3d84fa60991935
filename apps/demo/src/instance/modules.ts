import { importFrom } from "@kv/connector";
import { KvError, type Log, type Platform, type Transport } from "@kv/interface";
import { type CacheKind, registerCacheKind } from "@kv/plan";

interface Given {
  readonly log: Log;
}

/**
 * Opens the transport of a module, whose default export is a function `({ log }) => Transport`.
 * `specifier`: an installed package, a path, or a `file:` URL.
 * @throws `KV_CONFIG_INVALID`, and those of the function.
 */
export function openTransport(specifier: string, given: Given): Promise<Transport> {
  return made(specifier, given, "Transport", ["createAgent", "allocate", "close"]);
}

/** The same for a function `({ log }) => Platform`. */
export function createPlatform(specifier: string, given: Given): Promise<Platform> {
  return made(specifier, given, "Platform", ["kvCacheShape", "maxModelLen", "check"]);
}

/**
 * Adds the kind of cache that a module exports by default to this process's plans.
 * @throws `KV_CONFIG_INVALID`, `KV_PLAN_INVALID`.
 */
export async function addCacheKind(specifier: string): Promise<string> {
  const kind = await defaultExport(specifier);
  if (typeof kind !== "object" || kind === null)
    throw invalid(specifier, "its default export is no CacheKind");
  registerCacheKind(kind as CacheKind);
  return (kind as CacheKind).name;
}

async function made<T>(
  specifier: string,
  given: Given,
  what: string,
  methods: readonly string[],
): Promise<T> {
  const make = await defaultExport(specifier);
  if (typeof make !== "function")
    throw invalid(specifier, `its default export is no function that returns a ${what}`);
  const value = (await make(given)) as Readonly<Record<string, unknown>> | null;
  const lacking = methods.filter((name) => typeof value?.[name] !== "function");
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
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw invalid(specifier, `it could not be loaded: ${reason}`, cause);
  }
}

function invalid(specifier: string, reason: string, cause?: unknown): KvError {
  return new KvError("KV_CONFIG_INVALID", `module ${specifier}: ${reason}`, {
    cause,
    hint: `a module is a package installed in ${process.cwd()}, an absolute path of compiled JavaScript, or a file: URL`,
  });
}
