import { once } from "node:events";
import { type AddressInfo, connect, createServer, type Server, type Socket } from "node:net";
import {
  type Agent,
  type AmbientOptions,
  ambient,
  KvError,
  type Registration,
  remoteAddressKey,
} from "@kv/interface";
import { formatValue, requireObject } from "../validate.js";
import {
  encodeMessage,
  FrameReader,
  MAX_FRAME_BYTES,
  type MetadataMessage,
} from "./socket-frames.js";

/** What the exchange of metadata needs of an agent. */
export type MetadataAgent = Pick<Agent, "name" | "addRemote" | "removeRemote"> & {
  /** The agent's metadata, of all its memory or of these registrations. */
  localMetadata(options?: {
    registrations?: readonly Registration[] | undefined;
  }): Promise<Uint8Array>;
};

/** Options of `listenForMetadata`. */
export interface MetadataListenerOptions extends AmbientOptions {
  /** Address to listen on. @default "127.0.0.1" */
  readonly host?: string | undefined;
  /** Port; 0 for any free one. @default 0 */
  readonly port?: number | undefined;
  /**
   * Called when a peer has sent its metadata and is known, or has withdrawn it and is forgotten.
   */
  readonly onPeer?: ((name: string, change: "added" | "removed") => void) | undefined;
  /** Other limits than `METADATA_LISTENER_LIMITS`. */
  readonly limits?: Partial<Record<keyof typeof METADATA_LISTENER_LIMITS, number>> | undefined;
}

/** What one listener accepts. */
export const METADATA_LISTENER_LIMITS = {
  /** Connections at a time. */
  maxConnections: 64,
  /** Connections of one address at a time. */
  maxConnectionsPerAddress: 16,
  /** Bytes of a message. */
  maxFrameBytes: MAX_FRAME_BYTES,
  /** How long a message that has begun may take, as in NIXL. */
  frameMs: 5000,
  /** How long a connection may be silent. NIXL keeps one open for its next message. */
  idleMs: 60_000,
} as const;

/** A listener for the metadata of peers. */
export interface MetadataListener extends AsyncDisposable {
  /** The port it listens on. */
  readonly port: number;
  /** Stops listening and ends all connections. Peers stay known. */
  close(): Promise<void>;
}

/** Where an agent listens for metadata. */
export interface MetadataAddress {
  /** Name or address of its host. */
  readonly host: string;
  /** Port of its listener. */
  readonly port: number;
}

/** Options of a message to a listener. */
export interface MetadataExchangeOptions {
  /** How long to wait for the listener. @default 5_000 */
  readonly timeoutMs?: number | undefined;
}

const DEFAULT_TIMEOUT_MS = 5000;

/**
 * Listens for metadata as NIXL's listen thread does (`listen_port` of Python's `nixl_agent`), with
 * the same messages. Every message goes through `addRemote` and `removeRemote` of the agent, and so
 * through its checks; a message that fails is logged (`nixl-metadata-refused`) and ends its
 * connection. Nothing authenticates a sender: whoever reaches the port can add peers, and remove
 * those without prepared lists. It keeps `METADATA_LISTENER_LIMITS`. Rejects with
 * `KV_SIDE_CHANNEL_BIND_FAILED`, and `KV_CONFIG_INVALID` for wrong options.
 */
export async function listenForMetadata(
  agent: MetadataAgent,
  options: MetadataListenerOptions = {},
): Promise<MetadataListener> {
  requireObject(options, "KV_CONFIG_INVALID", "the options of listenForMetadata");
  const { host = "127.0.0.1", port = 0 } = options;
  requirePort(port);
  const limits = { ...METADATA_LISTENER_LIMITS, ...options.limits };
  const connections = new Set<Socket>();
  const server = createServer({ allowHalfOpen: true }, (socket) => {
    const addressOf = ({ remoteAddress = "" }: Socket) => remoteAddressKey(remoteAddress);
    const ofAddress = [...connections].filter((other) => addressOf(other) === addressOf(socket));
    if (
      connections.size >= limits.maxConnections ||
      ofAddress.length >= limits.maxConnectionsPerAddress
    ) {
      socket.destroy();
      return;
    }
    connections.add(socket);
    socket.on("close", () => connections.delete(socket));
    void serveConnection(agent, socket, limits, options.onPeer).catch((error: unknown) => {
      const { log } = ambient(options);
      log.warn("nixl-metadata-refused", { from: socket.remoteAddress, error: String(error) });
      socket.destroy();
    });
  });
  await listening(server, host, port);
  const close = async () => {
    for (const socket of connections) socket.destroy();
    if (server.listening) await new Promise((resolve) => server.close(resolve));
  };
  return { port: (server.address() as AddressInfo).port, close, [Symbol.asyncDispose]: close };
}

/**
 * Sends an agent's metadata to a listener (Python: `send_local_metadata`), of all its memory or of
 * `registrations`. Resolves when the bytes have left; NIXL's protocol has no answer. Rejects with
 * `KV_SIDE_CHANNEL_UNREACHABLE` or `KV_SIDE_CHANNEL_TIMEOUT`.
 */
export async function sendMetadata(
  agent: MetadataAgent,
  to: MetadataAddress,
  options: MetadataExchangeOptions & {
    readonly registrations?: readonly Registration[] | undefined;
  } = {},
): Promise<void> {
  const { registrations } = options;
  const metadata = await agent.localMetadata(registrations === undefined ? {} : { registrations });
  await exchange(to, { kind: "LOAD", metadata }, options, async () => undefined);
}

/**
 * Asks a listener for its agent's metadata, adds the peer, and returns its name (Python:
 * `fetch_remote_metadata`). Rejects with `KV_SIDE_CHANNEL_UNREACHABLE`, `KV_SIDE_CHANNEL_TIMEOUT`,
 * `KV_WIRE_MALFORMED`, and as `addRemote` does.
 */
export async function fetchMetadata(
  agent: MetadataAgent,
  from: MetadataAddress,
  options: MetadataExchangeOptions = {},
): Promise<string> {
  const metadata = await exchange(from, { kind: "SEND" }, options, answerOf);
  return await agent.addRemote(metadata);
}

/**
 * Tells a listener that this agent is not to be used any more (Python:
 * `invalidate_local_metadata`). Resolves when the bytes have left. Rejects with
 * `KV_SIDE_CHANNEL_UNREACHABLE` or `KV_SIDE_CHANNEL_TIMEOUT`.
 */
export async function invalidateMetadata(
  agent: Pick<MetadataAgent, "name">,
  at: MetadataAddress,
  options: MetadataExchangeOptions = {},
): Promise<void> {
  await exchange(at, { kind: "INVL", name: agent.name }, options, async () => undefined);
}

/**
 * Serves one connection of a listener until its peer ends it. Its messages are handled one after
 * another.
 */
async function serveConnection(
  agent: MetadataAgent,
  socket: Socket,
  limits: Record<keyof typeof METADATA_LISTENER_LIMITS, number>,
  onPeer: MetadataListenerOptions["onPeer"],
): Promise<void> {
  const reader = new FrameReader(limits.maxFrameBytes);
  let frameTimer: NodeJS.Timeout | undefined;
  socket.setTimeout(limits.idleMs, () => socket.destroy());
  socket.on("error", () => socket.destroy());
  socket.on("close", () => clearTimeout(frameTimer));
  for await (const chunk of socket) {
    const messages = reader.read(chunk as Buffer);
    // A frame's time begins with its first byte.
    if (messages.length > 0 || !reader.incomplete) {
      clearTimeout(frameTimer);
      frameTimer = undefined;
    }
    if (reader.incomplete) frameTimer ??= setTimeout(() => socket.destroy(), limits.frameMs);
    for (const message of messages) {
      if (message.kind === "SEND") {
        const metadata = await agent.localMetadata();
        // Read on once it has left: a sender that reads nothing must not pile up answers.
        await new Promise<void>((left) =>
          socket.write(encodeMessage({ kind: "LOAD", metadata }), () => left()),
        );
      } else if (message.kind === "LOAD") {
        const name = await agent.addRemote(message.metadata);
        onPeer?.(name, "added");
      } else {
        await agent.removeRemote(message.name);
        onPeer?.(message.name, "removed");
      }
    }
  }
  socket.end();
}

async function listening(server: Server, host: string, port: number): Promise<void> {
  server.listen(port, host);
  await once(server, "listening").catch((cause: Error) => {
    throw new KvError(
      "KV_SIDE_CHANNEL_BIND_FAILED",
      `cannot listen for metadata on ${host}:${port}: ${cause.message}`,
      { cause },
    );
  });
}

/** Sends one message on a connection of its own; `read` reads the answer. */
async function exchange<T>(
  at: MetadataAddress,
  message: MetadataMessage,
  options: MetadataExchangeOptions,
  read: (socket: Socket) => Promise<T>,
): Promise<T> {
  requireObject(at, "KV_CONFIG_INVALID", "the address of a listener");
  requirePort(at.port);
  const { timeoutMs = DEFAULT_TIMEOUT_MS } = options;
  const socket = connect({ host: at.host, port: at.port });
  let late = false;
  const timer = setTimeout(() => {
    late = true;
    socket.destroy(new Error("timeout"));
  }, timeoutMs);
  try {
    await once(socket, "connect");
    const answer = read(socket);
    await Promise.all([
      answer,
      new Promise<void>((sent) => socket.end(encodeMessage(message), sent)),
    ]);
    return await answer;
  } catch (cause) {
    if (KvError.is(cause)) throw cause;
    const place = `the metadata listener at ${at.host}:${at.port}`;
    if (late)
      throw new KvError(
        "KV_SIDE_CHANNEL_TIMEOUT",
        `${place} did not answer within ${timeoutMs} ms`,
      );
    throw new KvError(
      "KV_SIDE_CHANNEL_UNREACHABLE",
      `${place} cannot be reached: ${String(cause)}`,
      {
        cause,
      },
    );
  } finally {
    clearTimeout(timer);
    socket.destroy();
  }
}

async function answerOf(socket: Socket): Promise<Uint8Array> {
  const reader = new FrameReader();
  for await (const chunk of socket) {
    for (const message of reader.read(chunk as Buffer)) {
      if (message.kind === "LOAD") return message.metadata;
    }
  }
  throw new KvError(
    "KV_WIRE_MALFORMED",
    "the metadata listener closed the connection without metadata",
  );
}

function requirePort(port: unknown): void {
  if (typeof port === "number" && Number.isInteger(port) && port >= 0 && port < 65_536) return;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `the port is ${formatValue(port)}, not an integer from 0 to 65535`,
  );
}
