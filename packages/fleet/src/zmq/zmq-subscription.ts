import type { Clock, Timer } from "@kv/interface";
import { MAX_BATCH_BYTES } from "../kv-events/kv-event-batch.js";
import { readTcpEndpoint, ZmqConnection } from "./zmq-connection.js";

/** Options of `ZmqSubscription`. */
export interface ZmqSubscriptionOptions {
  /** `tcp://host:port` of a PUB or XPUB. */
  readonly endpoint: string;
  readonly clock: Clock;
  /** Called when a connection is established and the subscription is sent. */
  ready?(): void;
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

/**
 * A SUB of ZeroMQ's protocol to all topics of one publisher. It connects again until it is closed; the delay doubles until a message arrives. It does
 * not keep the process alive.
 */
export class ZmqSubscription {
  readonly #options: ZmqSubscriptionOptions;
  #connection: ZmqConnection | undefined;
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
    this.#connection?.close();
  }

  #connect(): void {
    const { endpoint, clock, message, ready, lost } = this.#options;
    const { host, port } = readTcpEndpoint(endpoint) ?? { host: "", port: 0 };
    let isEstablished = false;
    const connection = new ZmqConnection({
      ...{ host, port, unref: true, socketType: "SUB", peerTypes: ["PUB", "XPUB"] },
      ...{ maxFrames: SUBSCRIPTION_LIMITS.maxFrames, maxMessageBytes: SUBSCRIPTION_LIMITS.maxMessageBytes },
      ready: () => {
        isEstablished = true;
        this.#timer?.cancel();
        connection.subscribe();
        ready?.();
      },
      message: (frames) => {
        this.#delayMs = RECONNECT_MS;
        message(frames);
      },
      closed: (error) => {
        const isRefusal = error !== undefined && connection.waitsFor !== "the connection";
        if (isEstablished || isRefusal)
          lost(error === undefined ? "the publisher closed the connection" : reasonOf(error));
        this.#connectLater();
      },
    });
    this.#connection = connection;
    this.#timer = clock.setTimer(() => {
      connection.close();
      this.#connectLater();
    }, SUBSCRIPTION_LIMITS.greetingTimeoutMs);
  }

  #connectLater(): void {
    this.#timer?.cancel();
    if (this.#closed) return;
    this.#timer = this.#options.clock.setTimer(() => this.#connect(), this.#delayMs);
    this.#delayMs = Math.min(MAX_RECONNECT_MS, this.#delayMs * 2);
  }
}

function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
