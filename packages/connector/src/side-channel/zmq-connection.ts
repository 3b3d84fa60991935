import { connect, type Socket } from "node:net";
import { KvError } from "@kv/interface";
import { curveClient, type ZmtpEvent, ZmtpSession } from "@kv/protocol";
import { CURVE_HINT, type CurveKeySource, isAboutCurve, OTHER_MECHANISM } from "./curve.js";
import { reasonOf } from "./zmq-endpoint.js";

export type ConnectionStage = "connecting" | "greeting" | "established";

/** What a reply may be. */
export interface ReplyLimits {
  readonly maxReplyFrames: number;
  readonly maxReplyBytes: number;
}

/** Why a connection was refused or lost. */
export interface ConnectionLoss {
  readonly why: string;
  /** The peer's or this side's key or mechanism was refused. */
  readonly hint?: string | undefined;
  /** What the peer did. */
  readonly cause?: unknown;
}

/** Bytes of PONGs that a listener which does not read may leave unsent. */
const MAX_UNSENT_BYTES = 64 * 1024;

/** The REQ's end of a connection to a listener, for one request at a time. After a missing reply it cannot be used again. */
export class ZmqConnection {
  readonly #socket: Socket;
  readonly #session: ZmtpSession;
  readonly #limits: ReplyLimits;
  readonly #isCurve: boolean;
  readonly #greeted: Promise<void>;
  #establish: () => void = () => {};
  #stage: ConnectionStage = "connecting";
  #lost = false;
  #received: ((frames: readonly Uint8Array[]) => void) | undefined;
  /** Called once with the reason when the connection is refused or lost. */
  onLost: (loss: ConnectionLoss) => void = () => {};

  constructor(address: string, port: number, limits: ReplyLimits, curve: CurveKeySource) {
    this.#limits = limits;
    this.#isCurve = curve !== undefined;
    this.#session = new ZmtpSession({
      socketType: "REQ",
      peerTypes: ["ROUTER", "REP"],
      maxFrames: limits.maxReplyFrames,
      maxMessageBytes: limits.maxReplyBytes,
      mechanism: curve === undefined ? undefined : curveClient({ socketType: "REQ", keys: curve }),
    });
    this.#greeted = new Promise((resolve) => {
      this.#establish = resolve;
    });
    const socket = connect({ host: address, port, noDelay: true });
    this.#socket = socket;
    socket.on("connect", () => {
      this.#stage = "greeting";
      socket.write(this.#session.greeting);
    });
    socket.on("data", (chunk) => this.#read(chunk));
    socket.on("error", (error) => this.#lose(this.#whyFailed(error)));
    socket.on("close", () => this.#lose(this.#whyClosed()));
  }

  get stage(): ConnectionStage {
    return this.#stage;
  }

  /** The connection was closed by the peer, or because of what the peer sent. */
  get lost(): boolean {
    return this.#lost;
  }

  /** Resolves when the connection is established, so that a request's timeout covers only the exchange. */
  greeted(): Promise<void> {
    return this.#greeted;
  }

  /** Sends a request and resolves with the frames of its reply. It never settles when the connection is lost: see `onLost`. */
  exchange(frames: readonly Uint8Array[]): Promise<readonly Uint8Array[]> {
    return new Promise((resolve) => {
      this.#received = resolve;
      this.#write(this.#session.encode([new Uint8Array(0), ...frames]));
    });
  }

  /** An idle connection does not keep the process alive. */
  keepAlive(isInUse: boolean): void {
    if (isInUse) this.#socket.ref();
    else this.#socket.unref();
  }

  close(): void {
    this.onLost = () => {};
    this.#lost = true;
    this.#socket.destroy();
  }

  #read(chunk: Buffer): void {
    try {
      this.#session.push(chunk);
      for (let event = this.#session.read(); event !== undefined; event = this.#session.read())
        this.#handle(event);
    } catch (error) {
      this.#lose(this.#whyRefused(error));
    }
  }

  #handle(event: ZmtpEvent): void {
    if (event.type === "send") this.#write(event.chunks);
    else if (event.type === "ready") {
      this.#stage = "established";
      this.#establish();
    } else {
      const [delimiter, ...frames] = event.frames;
      const received = this.#received;
      this.#received = undefined;
      if (received === undefined || delimiter?.byteLength !== 0)
        throw new KvError("KV_WIRE_MALFORMED", "it sent a message that is not a reply to a request");
      received(frames);
    }
  }

  #write(chunks: readonly Uint8Array[]): void {
    if (chunks.length > 1) this.#socket.cork();
    for (const chunk of chunks) this.#socket.write(chunk);
    if (chunks.length > 1) this.#socket.uncork();
    if (this.#received === undefined && this.#socket.writableLength > MAX_UNSENT_BYTES)
      throw new KvError("KV_WIRE_LIMIT_EXCEEDED", "it asks for answers and does not read them");
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
      code === "ECONNREFUSED" ? "the connection was refused" : `the connection failed: ${reasonOf(error)}`;
    return { why };
  }

  #whyClosed(): ConnectionLoss {
    if (this.#stage === "established") return { why: "it closed the connection" };
    if (!this.#session.greetingBegun) {
      const why =
        "it closed the connection without a greeting: it does not speak ZMQ, or has no connection to spare";
      return this.#isCurve
        ? { why: `${why}, or has the mechanism NULL and not CURVE`, hint: CURVE_HINT }
        : { why };
    }
    if (!this.#isCurve) return { why: "it ended the ZMQ handshake" };
    if (!this.#session.greetingComplete) return { why: OTHER_MECHANISM, hint: CURVE_HINT };
    return { why: "it ended the CURVE handshake, as a listener with another key does", hint: CURVE_HINT };
  }

  #whyRefused(cause: unknown): ConnectionLoss {
    const hint = isAboutCurve(cause) ? CURVE_HINT : undefined;
    if (this.#stage !== "established")
      return {
        why: `the server there does not speak ZMQ as this side does: ${reasonOf(cause)}`,
        hint,
        cause,
      };
    const { maxReplyBytes, maxReplyFrames } = this.#limits;
    if (KvError.is(cause, "KV_WIRE_LIMIT_EXCEEDED"))
      return {
        why: `its reply is larger than ${maxReplyBytes} bytes or ${maxReplyFrames} frames: ${cause.message}`,
        cause,
      };
    return { why: reasonOf(cause), hint, cause };
  }
}
