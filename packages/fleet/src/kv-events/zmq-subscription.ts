import { connect, type Socket } from "node:net";
import { type Clock, KvError, type Timer } from "@kv/interface";
import { type ZmtpEvent, ZmtpSession } from "@kv/protocol";
import { MAX_BATCH_BYTES } from "./kv-event-batch.js";

/** Options of `ZmqSubscription`. */
export interface ZmqSubscriptionOptions {
  /** `tcp://host:port` of a PUB or XPUB. */
  readonly endpoint: string;
  readonly clock: Clock;
  /** Called with the frames of each message, in order. */
  message(frames: readonly Uint8Array[]): void;
  /** Called when a connection ends that was established, or when the publisher sends what is refused. */
  lost(reason: string): void;
}

/** What a publisher may send. One that exceeds a limit is disconnected; the subscription connects again. */
export const SUBSCRIPTION_LIMITS = {
  /** Frames of a message. */
  maxFrames: 8,
  /** Bytes of a message, all frames together: a batch, its sequence number and its topic. A larger frame is refused when its header arrives. */
  maxMessageBytes: MAX_BATCH_BYTES + 64 * 1024,
  /** From the connection to the end of ZMTP's handshake, in ms. */
  greetingTimeoutMs: 5000,
} as const;
const RECONNECT_MS = 100;
const MAX_RECONNECT_MS = 10_000;
const MAX_UNSENT_BYTES = 64 * 1024;

/**
 * A SUB of ZeroMQ's protocol to all topics of one publisher, over TCP. What the publisher sends is limited while it arrives; between two messages
 * the event loop has its turn. It connects again, with growing delays, until it is closed. It does not keep the process alive.
 */
export class ZmqSubscription {
  readonly #options: ZmqSubscriptionOptions;
  #socket: Socket | undefined;
  #timer: Timer | undefined;
  #delayMs = RECONNECT_MS;
  #closed = false;

  constructor(options: ZmqSubscriptionOptions) {
    this.#options = options;
    this.#connect();
  }

  close(): void {
    this.#closed = true;
    this.#timer?.cancel();
    this.#socket?.destroy();
  }

  #connect(): void {
    const { endpoint, clock } = this.#options;
    const [, host = "", port] = /^tcp:\/\/\[?(.+?)\]?:(\d+)$/.exec(endpoint) ?? [];
    const session = new ZmtpSession({
      socketType: "SUB",
      peerTypes: ["PUB", "XPUB"],
      maxFrames: SUBSCRIPTION_LIMITS.maxFrames,
      maxMessageBytes: SUBSCRIPTION_LIMITS.maxMessageBytes,
    });
    const socket = connect({ host, port: Number(port), noDelay: true, keepAlive: true });
    this.#socket = socket;
    socket.unref();
    let why: string | undefined;
    let isEstablished = false;
    this.#timer = clock.setTimer(() => socket.destroy(), SUBSCRIPTION_LIMITS.greetingTimeoutMs);

    const handle = (event: ZmtpEvent) => {
      if (event.type === "message") this.#options.message(event.frames);
      else if (event.type === "ready") {
        isEstablished = true;
        this.#timer?.cancel();
        this.#delayMs = RECONNECT_MS;
        for (const chunk of session.encodeSubscription()) socket.write(chunk);
      } else {
        for (const chunk of event.chunks) socket.write(chunk);
        if (socket.writableLength > MAX_UNSENT_BYTES)
          throw new KvError("KV_WIRE_LIMIT_EXCEEDED", "it asks for answers and does not read them");
      }
    };
    /** Up to one message. */
    const read = () => {
      if (socket.destroyed) return;
      try {
        for (let event = session.read(); event !== undefined; event = session.read()) {
          handle(event);
          if (event.type !== "message") continue;
          socket.pause();
          setImmediate(read);
          return;
        }
        socket.resume();
      } catch (error) {
        why = error instanceof Error ? error.message : String(error);
        socket.destroy();
      }
    };
    socket.on("connect", () => socket.write(session.greeting));
    socket.on("data", (chunk) => {
      const isReading = session.unread;
      session.push(chunk);
      if (!isReading) read();
    });
    socket.on("error", () => {});
    socket.on("close", () => {
      this.#timer?.cancel();
      if (this.#closed) return;
      if (isEstablished || why !== undefined)
        this.#options.lost(why ?? "the publisher closed the connection");
      this.#timer = clock.setTimer(() => this.#connect(), this.#delayMs);
      this.#delayMs = Math.min(MAX_RECONNECT_MS, this.#delayMs * 2);
    });
  }
}
