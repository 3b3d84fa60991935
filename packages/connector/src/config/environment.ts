import { KvError, type Log } from "@kv/interface";
import { suggestKey } from "./suggest-key.js";

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
 * one. Errors: `KV_CONFIG_INVALID`.
 */
export function readSideChannelEnvironment(
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
