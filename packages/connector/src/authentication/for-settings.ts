import { type Clock, KvError, type Log, type SideChannel } from "@kv/interface";
import type { ConnectorSettings } from "../config/connector-settings.js";
import { authenticatedSideChannel } from "./authenticated-side-channel.js";

/**
 * The engine's side channel as the settings want it: encrypted with `side_channel_curve`, with proofs of the key where a key is configured. Errors:
 * `KV_CONFIG_INVALID` when the side channel cannot encrypt.
 */
export function sideChannelFor(
  given: SideChannel,
  { handshakeKeys: keys, requiresHandshakeKey: isRequired, encryptsSideChannel }: ConnectorSettings,
  ambient: { readonly clock: Clock; readonly log: Log },
): SideChannel {
  if (keys === undefined) return given;
  let sideChannel = given;
  if (encryptsSideChannel) {
    if (given.withEncryption === undefined) {
      throw new KvError(
        "KV_CONFIG_INVALID",
        "kv_connector_extra_config.side_channel_curve is true, and the engine's side channel cannot encrypt",
        { hint: "use zmqSideChannel of @kv/connector, or leave side_channel_curve out" },
      );
    }
    sideChannel = given.withEncryption(() => keys.current(ambient.clock, ambient.log));
  }
  return authenticatedSideChannel({ sideChannel, keys, isRequired, ...ambient });
}
