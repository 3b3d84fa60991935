import {
  type BackendSpec,
  KvError,
  type KvTransferConfig,
  type Log,
  nearestName,
  silentLog,
} from "@kv/interface";
import {
  extraConfigSchema,
  kvTransferConfigSchema,
  readBy,
  UNUSED_DEFAULTS,
} from "./transfer-config-schema.js";

/** Options of `readTransferConfig`. */
export interface TransferConfigSources {
  /** Environment variables, usually `process.env`. @default none */
  readonly env?: Environment;
  /** Gets warnings about settings without effect. @default none are logged */
  readonly log?: Log;
  /** Keys of `kv_connector_extra_config` that a third-party connector reads. */
  readonly extraKeys?: readonly string[];
}

/**
 * Validates a `kv_transfer_config`, as JSON text or a value, and vLLM's environment variables.
 * @throws `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`; both name the key and the value.
 */
export function readTransferConfig(
  given: unknown,
  sources: TransferConfigSources = {},
): KvTransferConfig {
  const { env = {}, log = silentLog, extraKeys = [] } = sources;
  const value = typeof given === "string" ? parseJson(given) : given;
  refuseUnknownKeys(value);
  const data = readBy(kvTransferConfigSchema, value, "kv_transfer_config: ");
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

/** @throws `KV_CONFIG_UNKNOWN_KEY`: a connector's own settings have a place of their own. */
function refuseUnknownKeys(value: unknown): void {
  const known = Object.keys(kvTransferConfigSchema.shape);
  const isObject = typeof value === "object" && value !== null;
  const key = isObject ? Object.keys(value).find((name) => !known.includes(name)) : undefined;
  if (key === undefined) return;
  const meant = nearestName(key, known);
  const asked = meant === undefined ? "" : `did you mean ${meant}? `;
  throw new KvError(
    "KV_CONFIG_UNKNOWN_KEY",
    `kv_transfer_config has no key ${JSON.stringify(key)}`,
    {
      hint: `${asked}A connector's own settings belong in kv_connector_extra_config`,
      details: { key, nearest: meant, known },
    },
  );
}

/** Environment variables by name. */
export type Environment = Readonly<Record<string, string | undefined>>;

const PREFIX = "VLLM_NIXL_";
const KNOWN = [
  "VLLM_NIXL_SIDE_CHANNEL_HOST",
  "VLLM_NIXL_SIDE_CHANNEL_PORT",
  // The NIXL transport reads these.
  "VLLM_NIXL_BACKEND",
  "VLLM_NIXL_KVCACHE_BACKEND",
  // The connectors read these; vLLM 0.33 no longer does.
  "VLLM_NIXL_ABORT_REQUEST_TIMEOUT",
];
const DEFAULT_HOST = "localhost";
const DEFAULT_PORT = 5600;

/**
 * Port 0 takes a free one.
 * @throws `KV_CONFIG_INVALID`.
 */
function readSideChannelEnvironment(
  env: Environment,
  log: Log,
): { readonly host: string; readonly port: number } {
  for (const [name, value] of Object.entries(env)) {
    if (!name.startsWith(PREFIX) || KNOWN.includes(name)) continue;
    log.warn("setting-not-known", { key: name, value, nearest: nearestName(name, KNOWN) });
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

function warnOfUnreadExtra(
  extra: Readonly<Record<string, unknown>>,
  alsoKnown: readonly string[],
  log: Log,
): void {
  const known = [...Object.keys(extraConfigSchema.shape), ...alsoKnown];
  for (const [name, value] of Object.entries(extra)) {
    if (known.includes(name)) continue;
    const key = `kv_connector_extra_config.${name}`;
    log.warn("setting-not-known", { key, value, nearest: nearestName(name, known) });
  }
}

/**
 * Drops `num_threads` with a warning for backends other than UCX, as vLLM does.
 * @throws `KV_CONFIG_INVALID`.
 */
function readBackends(extra: Readonly<Record<string, unknown>>, log: Log): readonly BackendSpec[] {
  const schema = extraConfigSchema.pick({ backends: true, num_threads: true });
  const { backends, num_threads: threads } = readBy(schema, extra, "kv_connector_extra_config.");
  const names = backends ?? [];
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
