import { connect, type Socket } from "node:net";
import { KvError } from "@kv/interface";
import { type ZmtpEvent, ZmtpSession, type ZmtpSessionOptions } from "@kv/protocol";

/** Options of `ZmqConnection`. */
export interface ZmqConnectionOptions extends ZmtpSessionOptions {
  /** IP address, or a name that Node looks up. */
  readonly host: string;
  readonly port: number;
  /** The connection does not keep the process alive. */
  readonly unref?: boolean | undefined;
  /** Called once, when messages can be sent. */
  ready(): void;
  /** Called with the frames of each message, in order. What it throws closes the connection. */
  message(frames: readonly Uint8Array[]): void;
  /** Called once, unless `close` was called before. `error` says what was wrong; undefined where the peer closed the connection. */
  closed(error: unknown): void;
}

/** Bytes of PONGs that a peer which does not read may leave unsent. */
const MAX_UNSENT_BYTES = 64 * 1024;

/**
 * One TCP connection of ZeroMQ's protocol (ZMTP 3.0 and 3.1, as libzmq 4 speaks it). What the peer sends is limited while it arrives; between two
 * messages the event loop has its turn.
 */
export class ZmqConnection {
  readonly #options: ZmqConnectionOptions;
  readonly #session: ZmtpSession;
  readonly #socket: Socket;
  #stage: "the connection" | "its ZMQ greeting" | "its reply" = "the connection";
  #error: unknown;

  constructor(options: ZmqConnectionOptions) {
    const { host, port } = options;
    this.#options = options;
    this.#session = new ZmtpSession(options);
    const socket = connect({ host, port, noDelay: true, keepAlive: true });
    this.#socket = socket;
    if (options.unref === true) socket.unref();
    socket.on("connect", () => {
      this.#stage = "its ZMQ greeting";
      socket.write(this.#session.greeting);
    });
    socket.on("data", (chunk) => {
      const isReading = this.#session.unread;
      this.#session.push(chunk);
      if (!isReading) this.#read();
    });
    socket.on("error", (error) => {
      this.#error ??= error;
    });
    socket.on("close", () => options.closed(this.#error));
  }

  /** What the connection waits for, for messages. */
  get waitsFor(): "the connection" | "its ZMQ greeting" | "its reply" {
    return this.#stage;
  }

  /** Sends a message. */
  send(frames: readonly Uint8Array[]): void {
    for (const bytes of this.#session.encode(frames)) this.#socket.write(bytes);
  }

  /** Subscribes a SUB to all topics. */
  subscribe(): void {
    for (const bytes of this.#session.encodeSubscription()) this.#socket.write(bytes);
  }

  /** Closes the connection. `closed` is not called any more. */
  close(): void {
    this.#socket.removeAllListeners("close");
    this.#socket.destroy();
  }

  /** Up to one message. */
  #read(): void {
    if (this.#socket.destroyed) return;
    try {
      for (let event = this.#session.read(); event !== undefined; event = this.#session.read()) {
        this.#handle(event);
        if (event.type !== "message") continue;
        this.#socket.pause();
        setImmediate(() => this.#read());
        return;
      }
      this.#socket.resume();
    } catch (error) {
      this.#error ??= error;
      this.#socket.destroy();
    }
  }

  #handle(event: ZmtpEvent): void {
    if (event.type === "message") this.#options.message(event.frames);
    else if (event.type === "ready") {
      this.#stage = "its reply";
      this.#options.ready();
    } else {
      for (const bytes of event.chunks) this.#socket.write(bytes);
      if (this.#socket.writableLength > MAX_UNSENT_BYTES)
        throw new KvError("KV_WIRE_LIMIT_EXCEEDED", "it asks for answers and does not read them");
    }
  }
}

/** Host and port of `tcp://host:port`, an IPv6 address without its brackets; undefined for any other text. */
export function readTcpEndpoint(
  endpoint: string,
): { readonly host: string; readonly port: number } | undefined {
  const [, bracketed, plain, port] = /^tcp:\/\/(?:\[([^\]]+)\]|([^:[\]]+)):(\d{1,5})$/.exec(endpoint) ?? [];
  const host = bracketed ?? plain;
  return host === undefined || Number(port) > 65_535 ? undefined : { host, port: Number(port) };
}
