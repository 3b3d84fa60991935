import { KvError } from "@kv/interface";

/** The error for a configuration that cannot be used. */
export function invalidConfig(message: string, hint?: string, cause?: unknown): KvError {
  return new KvError("KV_CONFIG_INVALID", message, { hint, cause });
}
