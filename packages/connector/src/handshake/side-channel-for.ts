import { type Clock, KvError, type Log, type SideChannel } from "@kv/interface";
import type { ConnectorSettings } from "../config/connector-settings.js";

/** The engine's side channel, encrypted where `handshake_key_file` is set. Errors: `KV_CONFIG_INVALID` when the side channel cannot encrypt. */
export function sideChannelFor(
  given: SideChannel,
  { handshakeKeys: keys }: ConnectorSettings,
  { clock, log }: { readonly clock: Clock; readonly log: Log },
): SideChannel {
  if (keys === undefined) return given;
  if (given.withEncryption === undefined) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      "kv_connector_extra_config.handshake_key_file is set, and the engine's side channel cannot encrypt",
      { hint: "use zmqSideChannel of @kv/side-channel, or leave handshake_key_file out" },
    );
  }
  return given.withEncryption(() => keys.current(clock, log));
}
