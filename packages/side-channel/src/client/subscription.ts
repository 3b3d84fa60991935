import type { Clock, Timer } from "@kv/interface";
import { readTcpEndpoint } from "../zmq-endpoint.js";
import { ZmqConnection } from "./connection.js";

/** Limits of a publisher. Exceeding one disconnects it; the subscription connects again. */
export interface SubscriptionLimits {
  readonly maxFrames: number;
  /** Bytes of a message, all frames together. The header of a larger frame is refused. */
  readonly maxMessageBytes: number;
  /** From connecting to the end of ZMTP's handshake, in ms. */
  readonly greetingTimeoutMs: number;
}

/** Options of `ZmqSubscription`. */
export interface ZmqSubscriptionOptions {
  /** `tcp://host:port` of a PUB or XPUB. */
  readonly endpoint: string;
  readonly clock: Clock;
  readonly limits: SubscriptionLimits;
  ready?(): void;
  /**
   * Gets each message's frames in order. The next one waits for the promise, and its bytes wait at
   * the publisher.
   */
  message(frames: readonly Uint8Array[]): Promise<void> | undefined;
  /** An established connection ended, or the publisher's input was refused. */
  lost(reason: string): void;
}

const RECONNECT_MS = 100;
const MAX_RECONNECT_MS = 10_000;

/**
 * A SUB to all topics of one publisher. It reconnects until it is closed, with a delay that doubles
 * until a message arrives. It does not keep the process alive.
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
