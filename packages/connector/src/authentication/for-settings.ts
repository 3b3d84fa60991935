import type { Clock, Log, SideChannel } from "@kv/interface";
import type { ConnectorSettings } from "../config/connector-settings.js";
import { authenticatedSideChannel } from "./authenticated-side-channel.js";

/** The engine's side channel as the settings want it: with proofs of the key where a key is configured. */
export function sideChannelFor(
  sideChannel: SideChannel,
  { handshakeKeys: keys, requiresHandshakeKey: isRequired }: ConnectorSettings,
  ambient: { readonly clock: Clock; readonly log: Log },
): SideChannel {
  return keys === undefined
    ? sideChannel
    : authenticatedSideChannel({ sideChannel, keys, isRequired, ...ambient });
}
