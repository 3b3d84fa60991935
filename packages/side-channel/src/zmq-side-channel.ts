import { createServer, type Server, type Socket } from "node:net";
import {
  type AmbientOptions,
  ambient,
  KvError,
  type SideChannel,
  type SideChannelListener,
  settleAll,
} from "@kv/interface";
import { ZmqConnection } from "./client/connection.js";
import { IdleConnections, zmqRequest } from "./client/request.js";
import { type CurveKeySource, curveKeysFrom, type HandshakeKeys } from "./keys.js";
import { type Answer, ConnectionTable } from "./listener/connection-table.js";
import { type SideChannelLimits, sideChannelLimits } from "./listener/limits.js";
import { reasonOf, resolveHost } from "./zmq-endpoint.js";

/** Options of `zmqSideChannel`, with the limits of its listeners. */
export interface ZmqSideChannelOptions extends AmbientOptions, Partial<SideChannelLimits> {
  /**
   * Frames of a reply, with its delimiter. A listener that sends more is unreachable. @default 16
   */
  readonly maxReplyFrames?: number;
  /**
   * Bytes of a reply, all frames together. A listener that sends more is unreachable. @default 64 *
   * 1024 * 1024
   */
  readonly maxReplyBytes?: number;
  /** Encrypts all connections with these keys, as `withEncryption` does. */
  readonly handshakeKeys?: HandshakeKeys | undefined;
  /** Keeps connections for ten seconds for the next request to their address. @default true */
  readonly keepsConnections?: boolean;
}

/** The side channel over ZeroMQ's protocol. */
export interface ZmqSideChannel extends SideChannel, AsyncDisposable {
  /**
   * As `listen`, but `answer` also gets the message's connection, and may return undefined for no
   * answer.
   *
   * @throws `KV_SIDE_CHANNEL_BIND_FAILED`, `KV_SIDE_CHANNEL_CLOSED`.
   */
  listen(options: ListenOptions): Promise<SideChannelListener>;
  /**
   * Connects a DEALER, which the caller closes. Messages go both ways in any order. `identity`: the
   * routing id that a ROUTER sees.
   */
  dial(options: {
    readonly host: string;
    readonly port: number;
    readonly identity: string;
  }): ZmqConnection;
}

/**
 * The side channel over ZeroMQ's protocol, as in vLLM 0.32 and 0.33: a ROUTER answers REQ sockets
 * over TCP. It speaks ZMTP 3.0 and 3.1 itself, because libzmq limits neither the number of frames
 * nor the connections. Closing discards unsent bytes, so a dead peer does not delay the exit.
 * `withEncryption` uses CURVE with keys derived from the shared keys.
 */
export function zmqSideChannel(options: ZmqSideChannelOptions = {}): ZmqSideChannel {
  const { clock, log } = ambient(options);
  const { maxReplyFrames = 16, maxReplyBytes = 64 * 2 ** 20 } = options;
  const replies = { maxFrames: maxReplyFrames, maxMessageBytes: maxReplyBytes };
  const table = new ConnectionTable(clock, log, sideChannelLimits(options));
  const listeners = new Set<SideChannelListener>();
  const inFlight = new Set<(error: unknown) => void>();
  const idle = new IdleConnections(clock, options.keepsConnections === false ? 0 : 4);
  let closed = false;
  const refuseWhenClosed = () => {
    if (closed) throw channelClosed();
  };

  async function close(): Promise<void> {
    closed = true;
    for (const end of inFlight) end(channelClosed());
    idle.close();
    await settleAll([...listeners].map((listener) => listener.close()));
  }

  const side = (curve: CurveKeySource): ZmqSideChannel => ({
    withEncryption: (keys) => side(curveKeysFrom(keys)),
    async listen(given) {
      refuseWhenClosed();
      const opened = await openZmqListener(given, table, curve);
      const { host, port } = opened;
      const closeListener = async () => {
        listeners.delete(listener);
        await opened.close();
      };
      const listener = { host, port, close: closeListener, [Symbol.asyncDispose]: closeListener };
      listeners.add(listener);
      // It may have been closed while the port was bound.
      if (closed) {
        await listener.close();
        throw channelClosed();
      }
      return listener;
    },
    async request(given) {
      refuseWhenClosed();
      return zmqRequest(given, { clock, replies, inFlight, idle, curve });
    },
    dial(given) {
      refuseWhenClosed();
      return new ZmqConnection({
        ...given,
        ...replies,
        socketType: "DEALER",
        peerTypes: ["ROUTER"],
        curve,
      });
    },
    close,
    [Symbol.asyncDispose]: close,
  });
  const { handshakeKeys: keys } = options;
  return side(keys && curveKeysFrom(() => keys.current(clock, log)));
}

const channelClosed = () => new KvError("KV_SIDE_CHANNEL_CLOSED", "the side channel is closed");

/** Where a ROUTER is bound, and what takes its messages. */
export interface ListenOptions {
  readonly host: string;
  /** 0 takes a free port. */
  readonly port: number;
  readonly answer: Answer;
}

/**
 * Answers requests on a port as a ROUTER; with `curve`, over CURVE only.
 *
 * @throws `KV_SIDE_CHANNEL_BIND_FAILED`.
 */
async function openZmqListener(
  { host, port, answer }: ListenOptions,
  table: ConnectionTable,
  curve: CurveKeySource,
): Promise<SideChannelListener> {
  const sockets = new Set<Socket>();
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.on("close", () => sockets.delete(socket));
    table.admit(socket, answer, curve);
  });
  await bind(server, host, port);
  const closed = new Promise<void>((resolve) => server.on("close", resolve));
  // An accept that fails, as for lack of descriptors, is tried again.
  server.on("error", (error) =>
    table.warnings.warn("side-channel-accept-failed", "accept", { error }),
  );
  const address = server.address();
  return {
    host,
    port: typeof address === "object" && address !== null ? address.port : port,
    async close() {
      server.close();
      for (const socket of sockets) socket.destroy();
      await closed;
    },
  };
}

async function bind(server: Server, host: string, port: number): Promise<void> {
  try {
    const address = await resolveHost(host);
    await new Promise<void>((resolve, reject) => {
      server.once("error", reject);
      server.listen({ host: address, port, exclusive: true }, () => {
        server.off("error", reject);
        resolve();
      });
    });
  } catch (error) {
    throw new KvError(
      "KV_SIDE_CHANNEL_BIND_FAILED",
      `side channel: ${host}:${port} cannot be bound: ${reasonOf(error)}`,
      { hint: bindHint(error, host, port), details: { host, port }, cause: error },
    );
  }
}

function bindHint(error: unknown, host: string, port: number): string {
  const code = (error as { code?: unknown } | undefined)?.code;
  if (code === "EADDRINUSE")
    return `another engine has port ${port}: give each engine of a host its own VLLM_NIXL_SIDE_CHANNEL_PORT, or end the one that has it`;
  if (code === "EACCES")
    return "ports below 1024 are reserved: set VLLM_NIXL_SIDE_CHANNEL_PORT to a higher one";
  return `${host} must be a name or an address of this host: set VLLM_NIXL_SIDE_CHANNEL_HOST`;
}
