import { type BackendSpec, KvError, type Log } from "@kv/interface";
import { suggestKey } from "./suggest-key.js";
import { extraConfigSchema } from "./transfer-config-schema.js";

/** Warns of each key that has no effect. `alsoKnown`: keys that a third-party connector reads. */
export function warnOfUnreadExtra(
  extra: Readonly<Record<string, unknown>>,
  alsoKnown: readonly string[],
  log: Log,
): void {
  const known = [...Object.keys(extraConfigSchema.shape), ...alsoKnown];
  for (const [name, value] of Object.entries(extra)) {
    if (known.includes(name)) continue;
    const key = `kv_connector_extra_config.${name}`;
    log.warn("setting-not-known", { key, value, nearest: suggestKey(name, known) });
  }
}

/**
 * Converts `backends` and `num_threads` to NIXL's backend parameters. As in vLLM, `num_threads`
 * applies only to UCX: when the list has another backend, the number is dropped with a warning.
 * Errors: `KV_CONFIG_INVALID`.
 */
export function readBackends(
  extra: Readonly<Record<string, unknown>>,
  log: Log,
): readonly BackendSpec[] {
  const { num_threads: threads } = extra;
  if (
    threads !== undefined &&
    threads !== null &&
    !(Number.isSafeInteger(threads) && Number(threads) >= 1)
  ) {
    throw invalid("num_threads", threads, "an integer of at least 1");
  }
  const names = extra.backends ?? [];
  const areNames = (value: unknown): value is string[] =>
    Array.isArray(value) && value.every((name) => typeof name === "string" && name !== "");
  if (!areNames(names))
    throw invalid("backends", names, "a list of names", 'for example ["UCX"] or ["LIBFABRIC"]');
  if (new Set(names).size !== names.length)
    throw invalid("backends", names, "a list of different names");
  if (threads === undefined || threads === null) return names.map((name) => ({ name }));
  if (names.length === 1 && names[0] === "UCX")
    return [{ name: "UCX", parameters: { num_threads: String(threads) } }];
  const wonOver =
    names.length === 0 ? "no backend is named" : `the backends are ${names.join(", ")}`;
  log.warn("setting-not-used", {
    key: "kv_connector_extra_config.num_threads",
    value: threads,
    reason: `it applies only to UCX, and ${wonOver}`,
  });
  return names.map((name) => ({ name }));
}

function invalid(key: string, value: unknown, wanted: string, hint?: string): KvError {
  return new KvError(
    "KV_CONFIG_INVALID",
    `kv_connector_extra_config.${key} is ${JSON.stringify(value)}, not ${wanted}`,
    {
      ...(hint === undefined ? {} : { hint }),
      details: { key: `kv_connector_extra_config.${key}` },
    },
  );
}
