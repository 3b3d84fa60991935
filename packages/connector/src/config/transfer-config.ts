import {
  type BackendSpec,
  KvError,
  type KvTransferConfig,
  type Log,
  silentLog,
} from "@kv/interface";
import type { z } from "zod";
import {
  extraConfigSchema,
  kvTransferConfigSchema,
  UNUSED_DEFAULTS,
} from "./transfer-config-schema.js";

/** Options of `readTransferConfig`. */
export interface TransferConfigSources {
  /** Environment variables, usually `process.env`. @default none */
  readonly env?: Environment;
  /** Gets warnings about settings that have no effect. @default none are logged */
  readonly log?: Log;
  /**
   * Keys of `kv_connector_extra_config` that a third-party connector reads. They cause no warning.
   */
  readonly extraKeys?: readonly string[];
}

/**
 * Validates a `kv_transfer_config`, as JSON text or as a value, together with the environment
 * variables that vLLM reads. Settings without effect cause a warning.
 * @throws `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`; both name the key and the value.
 */
export function readTransferConfig(
  given: unknown,
  sources: TransferConfigSources = {},
): KvTransferConfig {
  const { env = {}, log = silentLog, extraKeys = [] } = sources;
  const value = typeof given === "string" ? parseJson(given) : given;
  const parsed = kvTransferConfigSchema.safeParse(value);
  if (!parsed.success) throw refusal(parsed.error, value);
  const data = parsed.data;
  for (const [key, usual] of Object.entries(UNUSED_DEFAULTS)) {
    const found = data[key as keyof typeof data] ?? undefined;
    if (found !== undefined && found !== usual) log.warn("setting-not-used", { key, value: found });
  }
  if (data.kv_role === "kv_both")
    log.warn("role-kv-both-is-deprecated", {
      note: "vLLM plans to remove kv_both (vllm#43807): set kv_producer for prefill instances and kv_consumer for decode instances",
    });
  const extra = data.kv_connector_extra_config ?? {};
  warnOfUnreadExtra(extra, extraKeys, log);
  const sideChannel = readSideChannelEnvironment(env, log);
  return {
    connector: data.kv_connector,
    ...(data.kv_connector_module_path == null ? {} : { modulePath: data.kv_connector_module_path }),
    role: data.kv_role,
    ...(data.engine_id == null ? {} : { engineId: data.engine_id }),
    ...(data.kv_buffer_device == null ? {} : { bufferDevice: data.kv_buffer_device }),
    loadFailurePolicy: data.kv_load_failure_policy,
    enablePermuteLocalKv: data.enable_permute_local_kv,
    sideChannelHost: sideChannel.host,
    sideChannelPort: sideChannel.port,
    backends: readBackends(extra, log),
    extra,
    env,
  };
}

function parseJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw KvError.from(error, "KV_CONFIG_INVALID", "kv_transfer_config is not JSON");
  }
}

function refusal(error: z.ZodError, given: unknown): KvError {
  const [issue] = error.issues;
  if (issue?.code === "unrecognized_keys") {
    const [key = ""] = issue.keys;
    const known = Object.keys(kvTransferConfigSchema.shape);
    const meant = suggestKey(key, known);
    const asked = meant === undefined ? "" : `did you mean ${meant}? `;
    return new KvError(
      "KV_CONFIG_UNKNOWN_KEY",
      `kv_transfer_config has no key ${JSON.stringify(key)}`,
      {
        hint: `${asked}A connector's own settings belong in kv_connector_extra_config`,
        details: { key, nearest: meant, known },
      },
    );
  }
  const path = issue?.path ?? [];
  const key = path.join(".");
  const value = path.reduce<unknown>(
    (at, name) => (at as Record<PropertyKey, unknown> | undefined)?.[name],
    given,
  );
  return new KvError(
    "KV_CONFIG_INVALID",
    `kv_transfer_config: ${key || "the value"} is ${JSON.stringify(value)?.slice(0, 200) ?? "missing"}: ${issue?.message ?? "invalid"}`,
    { details: { key } },
  );
}

/** Environment variables by name, such as `process.env`. */
export type Environment = Readonly<Record<string, string | undefined>>;

const PREFIX = "VLLM_NIXL_";
const KNOWN = [
  "VLLM_NIXL_SIDE_CHANNEL_HOST",
  "VLLM_NIXL_SIDE_CHANNEL_PORT",
  // The NIXL transport reads these, and logs which of them have no effect.
  "VLLM_NIXL_BACKEND",
  "VLLM_NIXL_KVCACHE_BACKEND",
  // The connectors read these. vLLM 0.33 no longer does, but the guides of earlier versions name
  // them.
  "VLLM_NIXL_ABORT_REQUEST_TIMEOUT",
];
const DEFAULT_HOST = "localhost";
const DEFAULT_PORT = 5600;

/**
 * Where this engine's side channel listens, from the variables that vLLM reads. Port 0 takes a free
 * one.
 * @throws `KV_CONFIG_INVALID`.
 */
function readSideChannelEnvironment(
  env: Environment,
  log: Log,
): { readonly host: string; readonly port: number } {
  for (const [name, value] of Object.entries(env)) {
    if (!name.startsWith(PREFIX) || KNOWN.includes(name)) continue;
    log.warn("setting-not-known", { key: name, value, nearest: suggestKey(name, KNOWN) });
  }
  const host = env.VLLM_NIXL_SIDE_CHANNEL_HOST || DEFAULT_HOST;
  if (["0.0.0.0", "::", "*"].includes(host)) {
    log.warn("side-channel-host-is-no-address", {
      key: "VLLM_NIXL_SIDE_CHANNEL_HOST",
      value: host,
      reason:
        "peers connect to the host that is announced here; from another machine it does not lead to this one",
    });
  }
  return { host, port: port(env.VLLM_NIXL_SIDE_CHANNEL_PORT) };
}

function port(text: string | undefined): number {
  if (text === undefined || text === "") return DEFAULT_PORT;
  if (/^\d{1,5}$/.test(text) && Number(text) <= 65_535) return Number(text);
  throw new KvError(
    "KV_CONFIG_INVALID",
    `VLLM_NIXL_SIDE_CHANNEL_PORT is ${JSON.stringify(text)}, not a port from 0 to 65535`,
    { details: { key: "VLLM_NIXL_SIDE_CHANNEL_PORT" } },
  );
}

/** Warns of each key that has no effect. `alsoKnown`: keys that a third-party connector reads. */
function warnOfUnreadExtra(
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
 * @throws `KV_CONFIG_INVALID`.
 */
function readBackends(extra: Readonly<Record<string, unknown>>, log: Log): readonly BackendSpec[] {
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

/**
 * The known key with the smallest edit distance to `word`, at most half of the key's length.
 * Undefined when no key is that close.
 */
function suggestKey(word: string, known: readonly string[]): string | undefined {
  let best: { word: string; edits: number } | undefined;
  // Limits the cost for long keys.
  const start = word.slice(0, 100);
  for (const candidate of known) {
    const edits = distance(start, candidate);
    if (best === undefined || edits < best.edits) best = { word: candidate, edits };
  }
  return best !== undefined && best.edits <= best.word.length / 2 ? best.word : undefined;
}

function distance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, i) => i);
  for (let i = 1; i <= a.length; i += 1) {
    const next = [i];
    for (let j = 1; j <= b.length; j += 1) {
      const substitution = (row[j - 1] ?? 0) + (a[i - 1] === b[j - 1] ? 0 : 1);
      next.push(Math.min(substitution, (row[j] ?? 0) + 1, (next[j - 1] ?? 0) + 1));
    }
    row = next;
  }
  return row[b.length] ?? 0;
}
