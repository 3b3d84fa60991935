import { readTransferConfig } from "@kv/connector";
import type { KvTransferConfig, Log } from "@kv/interface";
import type { InstanceConfig } from "./instance-config.js";

/**
 * The `kv_transfer_config` of an instance. The side channel's address is that of the instance's settings, else of vLLM's variables, else a free
 * port of 127.0.0.1. A variable that a setting overrides causes a warning. Errors: those of `readTransferConfig`.
 */
export function transferConfigOf(
  { kvTransferConfig, sideChannelHost, sideChannelPort }: InstanceConfig,
  { env, log }: { readonly env: Readonly<Record<string, string | undefined>>; readonly log: Log },
): KvTransferConfig {
  const resolve = (name: string, setting: string, given: string | undefined, usual: string): string => {
    const variable = env[name] || undefined;
    if (given === undefined) return variable ?? usual;
    if (variable !== undefined && variable !== given)
      log.warn("setting-not-used", { key: name, value: variable, used: given, reason: `${setting} is set` });
    return given;
  };
  return readTransferConfig(kvTransferConfig, {
    log,
    env: {
      ...env,
      VLLM_NIXL_SIDE_CHANNEL_HOST: resolve(
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "sideChannelHost",
        sideChannelHost,
        "127.0.0.1",
      ),
      VLLM_NIXL_SIDE_CHANNEL_PORT: resolve(
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "sideChannelPort",
        sideChannelPort === undefined ? undefined : String(sideChannelPort),
        "0",
      ),
    },
  });
}
