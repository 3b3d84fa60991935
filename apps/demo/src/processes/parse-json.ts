import { KvError } from "@kv/interface";

/**
 * Reads the JSON object of an option.
 * @throws `KV_CONFIG_INVALID`.
 */
export function parseJson(option: string, text: string): Record<string, unknown> {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (cause) {
    throw new KvError("KV_CONFIG_INVALID", `${option} is not JSON: ${(cause as Error).message}`, {
      cause,
    });
  }
  if (typeof value === "object" && value !== null && !Array.isArray(value))
    return value as Record<string, unknown>;
  throw new KvError("KV_CONFIG_INVALID", `${option} is ${text.slice(0, 100)}, not a JSON object`);
}
