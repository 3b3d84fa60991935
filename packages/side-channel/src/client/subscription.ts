import type { Clock, Timer } from "@kv/interface";
import { readTcpEndpoint } from "../zmq-endpoint.js";
import { ZmqConnection } from "./connection.js";

/**
 * What a publisher may send. One that exceeds a limit is disconnected; the subscription connects
 * again.
 */
export interface SubscriptionLimits {
  readonly maxFrames: number;
  /** Bytes of a message, all frames together. A larger frame is refused when its header arrives. */
  readonly maxMessageBytes: number;
  /** From the connection to the end of ZMTP's handshake, in ms. */
  readonly greetingTimeoutMs: number;
}

/** Options of `ZmqSubscription`. */
export interface ZmqSubscriptionOptions {
  /** `tcp://host:port` of a PUB or XPUB. */
  readonly endpoint: string;
  readonly clock: Clock;
  readonly limits: SubscriptionLimits;
  /** Called when a connection is established and the subscription is sent. */
  ready?(): void;
  /**
   * Called with the frames of each message, in order. The next one is read when its promise has
   * resolved: until then the publisher's bytes wait at the publisher.
   */
  message(frames: readonly Uint8Array[]): Promise<void> | undefined;
  /**
   * Called when a connection ends that was established, or when the publisher sends what is
   * refused.
   */
  lost(reason: string): void;
}

const RECONNECT_MS = 100;
const MAX_RECONNECT_MS = 10_000;

/**
 * A SUB of ZeroMQ's protocol to all topics of one publisher. It connects again until it is closed;
 * the delay doubles until a message arrives. It does not keep the process alive.
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
    const { endpoint, clock, limits, message, ready, lost } = this.#options;
    const { host, port } = readTcpEndpoint(endpoint) ?? { host: "", port: 0 };
    const connection = new ZmqConnection({
      host,
      port,
      socketType: "SUB",
      peerTypes: ["PUB", "XPUB"],
      maxFrames: limits.maxFrames,
      maxMessageBytes: limits.maxMessageBytes,
    });
    connection.keepAlive(false);
    connection.onEstablished = () => {
      this.#timer?.cancel();
      connection.subscribe();
      ready?.();
    };
    connection.onMessage = (frames) => {
      this.#delayMs = RECONNECT_MS;
      return message(frames);
    };
    connection.onLost = ({ why, cause }) => {
      if (connection.stage === "established" || cause !== undefined) lost(why);
      this.#connectLater();
    };
    this.#connection = connection;
    this.#timer = clock.setTimer(() => {
      connection.close();
      this.#connectLater();
    }, limits.greetingTimeoutMs);
  }

  #connectLater(): void {
    this.#timer?.cancel();
    if (this.#closed) return;
    this.#timer = this.#options.clock.setTimer(() => this.#connect(), this.#delayMs);
    this.#delayMs = Math.min(MAX_RECONNECT_MS, this.#delayMs * 2);
  }
}
