import {
  type AmbientOptions,
  ambient,
  KvError,
  type SideChannel,
  type SideChannelListener,
} from "@kv/interface";
import { createIdleConnections } from "./zmq-connections.js";
import { openZmqListener } from "./zmq-listener.js";
import { zmqRequest } from "./zmq-request.js";

/** Options of `zmqSideChannel`. */
export interface ZmqSideChannelOptions extends AmbientOptions {
  /** Longest frame of a request, in bytes. ZMQ closes the connection of a peer that sends a longer one. */
  readonly maxRequestBytes?: number;
  /** Longest frame of a reply, in bytes. Default 64 MiB. */
  readonly maxReplyBytes?: number;
  /** Requests that one listener handles at a time; further ones wait in the sockets. */
  readonly maxPending?: number;
}

/**
 * The side channel over ZMQ, as in vLLM 0.32 and 0.33: a ROUTER socket answers REQ sockets over TCP. Every socket has `linger: 0`;
 * otherwise a dead peer would delay the exit of the process.
 */
export function zmqSideChannel(options: ZmqSideChannelOptions = {}): SideChannel {
  const { clock, log } = ambient(options);
  const { maxRequestBytes = 4096, maxReplyBytes = 64 * 2 ** 20, maxPending = 256 } = options;
  const listeners = new Set<SideChannelListener>();
  const inFlight = new Set<(error: unknown) => void>();
  const idle = createIdleConnections(clock);
  let closed = false;
  const refuseWhenClosed = () => {
    if (closed) throw channelClosed();
  };

  return {
    async listen(given) {
      refuseWhenClosed();
      const opened = await openZmqListener({ ...given, clock, log, maxRequestBytes, maxPending });
      const listener: SideChannelListener = {
        host: opened.host,
        port: opened.port,
        async close() {
          listeners.delete(listener);
          await opened.close();
        },
      };
      listeners.add(listener);
      // The side channel may have been closed while the port was bound.
      if (closed) {
        await listener.close();
        throw channelClosed();
      }
      return listener;
    },
    async request(given) {
      refuseWhenClosed();
      return zmqRequest(given, { clock, maxReplyBytes, inFlight, idle });
    },
    async close() {
      closed = true;
      for (const end of inFlight) end(channelClosed());
      idle.close();
      await Promise.all([...listeners].map((listener) => listener.close()));
    },
  };
}

const channelClosed = () => new KvError("KV_SIDE_CHANNEL_CLOSED", "the side channel is closed");
