import { KvError, type KvTransferConfig, type Log, silentLog } from "@kv/interface";
import type { z } from "zod";
import { type Environment, readSideChannelEnvironment } from "./environment.js";
import { readBackends, warnOfUnreadExtra } from "./extra-config.js";
import { suggestKey } from "./suggest-key.js";
import { kvTransferConfigSchema, UNUSED_DEFAULTS } from "./transfer-config-schema.js";

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
 * variables that vLLM reads. Settings without effect cause a warning. Errors:
 * `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`; both name the key and the value.
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
