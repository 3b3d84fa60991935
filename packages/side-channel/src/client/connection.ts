import { connect, type Socket } from "node:net";
import { KvError } from "@kv/interface";
import { CURVE_HINT, type CurveKeySource, isAboutCurve, OTHER_MECHANISM } from "../keys.js";
import { reasonOf } from "../zmq-endpoint.js";
import { curveClient } from "../zmtp/curve.js";
import { type ZmtpEvent, ZmtpSession, type ZmtpSessionOptions } from "../zmtp/session.js";

export type ConnectionStage = "connecting" | "greeting" | "established";

/** Options of `ZmqConnection`. */
export interface ZmqConnectionOptions extends Omit<ZmtpSessionOptions, "mechanism"> {
  readonly host: string;
  readonly port: number;
  /** The keys of CURVE. Undefined: NULL. */
  readonly curve?: CurveKeySource;
}

export interface ConnectionLoss {
  readonly why: string;
  readonly hint?: string | undefined;
  readonly cause?: unknown;
}

/** Unsent PONGs, in bytes, for a peer that does not read. */
const MAX_UNSENT_BYTES = 64 * 1024;

/**
 * The client's end of one ZMTP 3.0 or 3.1 connection, as libzmq 4 speaks it. Input is limited as it
 * arrives, and the event loop has its turn between messages.
 */
export class ZmqConnection {
  readonly #options: ZmqConnectionOptions;
  readonly #socket: Socket;
  readonly #session: ZmtpSession;
  #stage: ConnectionStage = "connecting";
  #lost = false;
  #sentBytes = 0;
  onEstablished: () => void = () => {};
  /**
   * Gets each message's frames in order; the next waits for the promise. An error closes the
   * connection.
   */
  onMessage: (frames: readonly Uint8Array[]) => Promise<void> | undefined = refuseMessage;
  onLost: (loss: ConnectionLoss) => void = () => {};

  constructor(options: ZmqConnectionOptions) {
    const { host, port, curve, socketType, identity } = options;
    this.#options = options;
    const mechanism =
      curve === undefined ? undefined : curveClient({ socketType, identity, keys: curve });
    this.#session = new ZmtpSession({ ...options, mechanism });
    const socket = connect({ host, port, noDelay: true, keepAlive: true });
    this.#socket = socket;
    socket.on("connect", () => {
      this.#stage = "greeting";
      socket.write(this.#session.greeting);
    });
    socket.on("data", (chunk) => {
      const isReading = this.#session.unread;
      this.#session.push(chunk);
      if (!isReading) this.#read();
    });
    socket.on("error", (error) => this.#lose(this.#whyFailed(error)));
    socket.on("close", () => this.#lose(this.#whyClosed()));
  }

  get stage(): ConnectionStage {
    return this.#stage;
  }

  get lost(): boolean {
    return this.#lost;
  }

  get unsentBytes(): number {
    return this.#socket.writableLength;
  }

  send(frames: readonly Uint8Array[]): void {
    this.#sentBytes = frames.reduce((sum, { byteLength }) => sum + byteLength, 0);
    this.#write(this.#session.encode(frames));
  }

  subscribe(): void {
    this.#write(this.#session.encodeSubscription());
  }

  /** Whether it keeps the process alive. Default true. */
  keepAlive(isInUse: boolean): void {
    if (isInUse) this.#socket.ref();
    else this.#socket.unref();
  }

  /** `onLost` is not called any more. */
  close(): void {
    this.#lost = true;
    this.#socket.destroy();
  }

  /** As `close`, after the last byte has left. */
  end(): void {
    this.#lost = true;
    this.#socket.destroySoon();
  }

  #read(): void {
    if (this.#lost) return;
    try {
      for (let event = this.#session.read(); event !== undefined; event = this.#session.read()) {
        const handled = this.#handle(event);
        // A message that nobody waits for ends the connection before the reply that it came with
        // counts.
        if (event.type !== "message" || this.onMessage === refuseMessage) continue;
        this.#socket.pause();
        if (handled === undefined) setImmediate(() => this.#read());
        else
          handled.then(
            () => this.#read(),
            (error: unknown) => this.#lose(this.#whyRefused(error)),
          );
        return;
      }
      this.#socket.resume();
    } catch (error) {
      this.#lose(this.#whyRefused(error));
    }
  }

  #handle(event: ZmtpEvent): Promise<void> | undefined {
    if (event.type === "message") return this.onMessage(event.frames);
    if (event.type === "ready") {
      this.#stage = "established";
      this.onEstablished();
    } else {
      this.#write(event.chunks);
      if (this.#socket.writableLength > MAX_UNSENT_BYTES + this.#sentBytes)
        throw new KvError("KV_WIRE_LIMIT_EXCEEDED", "it asks for answers and does not read them");
    }
    return undefined;
  }

  #write(chunks: readonly Uint8Array[]): void {
    if (chunks.length > 1) this.#socket.cork();
    for (const chunk of chunks) this.#socket.write(chunk);
    if (chunks.length > 1) this.#socket.uncork();
  }

  #lose(loss: ConnectionLoss): void {
    if (this.#lost) return;
    this.#lost = true;
    this.#socket.destroy();
    this.onLost(loss);
  }

  #whyFailed(error: Error): ConnectionLoss {
    if (this.#stage !== "connecting") return this.#whyClosed();
    const { code } = error as { code?: string };
    const why =
      code === "ECONNREFUSED"
        ? "the connection was refused"
        : `the connection failed: ${reasonOf(error)}`;
    return { why };
  }

  #whyClosed(): ConnectionLoss {
    if (this.#stage === "established") return { why: "it closed the connection" };
    const isCurve = this.#options.curve !== undefined;
    if (!this.#session.greetingBegun) {
      const why =
        "it closed the connection without a greeting: it does not speak ZMQ, or has no connection to spare";
      return isCurve
        ? { why: `${why}, or has the mechanism NULL and not CURVE`, hint: CURVE_HINT }
        : { why };
    }
    if (!isCurve) return { why: "it ended the ZMQ handshake" };
    const why = this.#session.greetingComplete
      ? "it ended the CURVE handshake, as a listener with another key does"
      : OTHER_MECHANISM;
    return { why, cause: new KvError("KV_HANDSHAKE_UNTRUSTED", why) };
  }

  #whyRefused(cause: unknown): ConnectionLoss {
    if (isAboutCurve(cause)) return { why: reasonOf(cause), cause };
    if (this.#stage !== "established")
      return {
        why: `the server there does not speak ZMQ as this side does: ${reasonOf(cause)}`,
        cause,
      };
    const { maxMessageBytes, maxFrames } = this.#options;
    const what = `its message is larger than ${maxMessageBytes} bytes or ${maxFrames} frames: `;
    return {
      why: `${KvError.is(cause, "KV_WIRE_LIMIT_EXCEEDED") ? what : ""}${reasonOf(cause)}`,
      cause,
    };
  }
}

export function refuseMessage(): undefined {
  throw new KvError("KV_WIRE_MALFORMED", "it sent a message that is not a reply to a request");
}
