import type { SideChannel } from "@kv/interface";

/** Where an instance answers handshakes. */
export interface SideChannelAddress {
  readonly host: string;
  readonly port: number;
}

/** A side channel that reports the address of each listener, as port 0 takes a free one. */
export function observedSideChannel(
  sideChannel: SideChannel,
  onListening: (address: SideChannelAddress) => void,
): SideChannel {
  const withEncryption = sideChannel.withEncryption?.bind(sideChannel);
  return {
    async listen(options) {
      const listener = await sideChannel.listen(options);
      onListening({ host: listener.host, port: listener.port });
      return listener;
    },
    request: (options) => sideChannel.request(options),
    close: () => sideChannel.close(),
    ...(withEncryption === undefined
      ? {}
      : { withEncryption: (keys) => observedSideChannel(withEncryption(keys), onListening) }),
  };
}
