import type { Socket } from "node:net";
import { type Clock, KvError, type SideChannelListenOptions } from "@kv/interface";
import { CURVE_HINT, type CurveKeySource, isAboutCurve, OTHER_MECHANISM } from "../keys/curve.js";
import { reasonOf } from "../zmq-endpoint.js";
import { curveServer } from "../zmtp/curve.js";
import { type ZmtpEvent, ZmtpSession } from "../zmtp/session.js";
import type { SideChannelLimits } from "./limits.js";

/** What a connection needs of the table that it is in. */
export interface ConnectionHost {
  readonly clock: Clock;
  readonly limits: SideChannelLimits;
  /** True when the connection may handle an event now. Otherwise its `pump` is called later. */
  mayProceed(connection: ServedConnection): boolean;
  /** Calls `pump` when other connections have had their turn. */
  later(connection: ServedConnection): void;
  /** An answer is being waited for, or no longer. */
  answering(change: 1 | -1): void;
  /** The peer has not taken all bytes that were written. */
  sending(connection: ServedConnection): void;
  sent(connection: ServedConnection): void;
  closed(connection: ServedConnection): void;
  complain(event: string, reason: string, fields: Readonly<Record<string, unknown>>): void;
}

/**
 * What a connection waits for: the peer's greeting, its next request, the rest of a request, its
 * turn, `answer`, or the peer to read.
 */
type Phase = "greeting" | "idle" | "receiving" | "waiting" | "answering" | "sending";

/**
 * Which connections make room for new ones first: those that wait for their peers, and then those
 * that wait for their turn. One whose request is being answered makes none.
 */
const EVICTION_RANK: Readonly<Record<Phase, number>> = {
  idle: 0,
  greeting: 0,
  receiving: 0,
  sending: 0,
  waiting: 1,
  answering: Number.POSITIVE_INFINITY,
};

/** Events that a connection handles before others have their turn. */
const EVENTS_PER_TURN = 16;

/** The ROUTER's end of one connection: answers its requests, one after another. */
export class ServedConnection {
  /** `remoteAddressKey` of the peer. */
  readonly address: string;
  readonly #socket: Socket;
  readonly #host: ConnectionHost;
  readonly #answer: SideChannelListenOptions["answer"];
  readonly #session: ZmtpSession;
  #phase: Phase = "greeting";
  #sinceMs: number;
  #deadlineMs: number;
  #lastRequestMs = 0;
  #closed = false;
  readonly #flushed = () => {
    if (this.#closed || this.#phase !== "sending" || this.#socket.writableLength > 0) return;
    this.#host.sent(this);
    this.#enter("idle");
    this.pump();
  };

  constructor(
    socket: Socket,
    address: string,
    answer: SideChannelListenOptions["answer"],
    curve: CurveKeySource,
    host: ConnectionHost,
  ) {
    const { limits, clock } = host;
    this.address = address;
    this.#socket = socket;
    this.#host = host;
    this.#answer = answer;
    this.#session = new ZmtpSession({
      socketType: "ROUTER",
      peerTypes: ["REQ", "DEALER", "ROUTER"],
      maxFrames: limits.maxRequestFrames,
      maxMessageBytes: limits.maxRequestBytes,
      mechanism:
        curve === undefined ? undefined : curveServer({ socketType: "ROUTER", keys: curve }),
    });
    this.#sinceMs = clock.now();
    this.#deadlineMs = this.#sinceMs + limits.greetingTimeoutMs;
    socket.setNoDelay(true);
    socket.on("error", () => {});
    socket.on("close", () => {
      const { greetingBegun, greetingComplete } = this.#session;
      if (curve !== undefined && greetingBegun && !greetingComplete)
        this.refuse("KV_HANDSHAKE_UNTRUSTED", { error: OTHER_MECHANISM, hint: CURVE_HINT });
      this.close();
    });
    socket.on("data", (chunk) => this.#received(chunk));
    socket.write(this.#session.greeting);
  }

  get queuedBytes(): number {
    return this.#socket.writableLength;
  }

  /**
   * Its next event may be a request, which has to wait when as many as may be are being answered.
   */
  get mayAsk(): boolean {
    return this.#phase !== "greeting";
  }

  /** Lower ranks make room first; infinite for one that does not. */
  get evictionRank(): number {
    return EVICTION_RANK[this.#phase];
  }

  get sinceMs(): number {
    return this.#sinceMs;
  }

  /** Closes the connection when it has waited for its peer for too long. */
  checkDeadline(nowMs: number): void {
    if (nowMs < this.#deadlineMs) return;
    if (this.#phase === "idle") this.close();
    else
      this.refuse("slow", { waitedForMs: Math.round(nowMs - this.#sinceMs), phase: this.#phase });
  }

  /** Closes the connection because of what its peer did, which is logged. */
  refuse(reason: string, fields: Readonly<Record<string, unknown>> = {}): void {
    if (this.#closed) return;
    this.#host.complain("side-channel-connection-closed", reason, {
      reason,
      peer: this.address,
      ...fields,
    });
    this.close();
  }

  close(): void {
    if (this.#closed) return;
    this.#closed = true;
    this.#socket.destroy();
    this.#host.closed(this);
  }

  /**
   * Handles what has arrived, up to a request that has to be waited for, or until others have their
   * turn.
   */
  pump(): void {
    if (this.#busy) return;
    try {
      for (let events = 0; this.#session.unread; events += 1) {
        if (events >= EVENTS_PER_TURN || !this.#host.mayProceed(this)) {
          if (events >= EVENTS_PER_TURN) this.#host.later(this);
          if (this.#phase !== "greeting" && this.#phase !== "waiting") this.#enter("waiting");
          return;
        }
        const event = this.#session.read();
        if (event === undefined) break;
        this.#handle(event);
        if (this.#busy) return;
      }
    } catch (error) {
      const fields = {
        error: reasonOf(error),
        ...(isAboutCurve(error) ? { hint: CURVE_HINT } : {}),
      };
      this.refuse(KvError.is(error) ? error.code : "failed", fields);
      return;
    }
    this.#rest();
  }

  get #busy(): boolean {
    return this.#closed || this.#phase === "answering" || this.#phase === "sending";
  }

  #received(chunk: Buffer): void {
    // What arrived before has not been read yet: the rest waits in the socket.
    if (this.#session.unread) this.#socket.pause();
    this.#session.push(chunk);
    if (this.#phase !== "waiting") this.pump();
  }

  /** All that has arrived was read. */
  #rest(): void {
    if (this.#socket.isPaused()) this.#socket.resume();
    if (this.#phase === "greeting") return;
    const phase = this.#session.partial ? "receiving" : "idle";
    if (this.#phase !== phase) this.#enter(phase);
  }

  #enter(phase: Phase): void {
    const { clock, limits } = this.#host;
    this.#phase = phase;
    // Only a request ends idleness; otherwise a heartbeat would.
    this.#sinceMs = phase === "idle" ? this.#lastRequestMs : clock.now();
    if (phase === "idle") this.#deadlineMs = this.#sinceMs + limits.idleTimeoutMs;
    else if (phase === "receiving" || phase === "sending")
      this.#deadlineMs = this.#sinceMs + limits.messageTimeoutMs;
    else this.#deadlineMs = Number.POSITIVE_INFINITY;
  }

  #handle(event: ZmtpEvent): void {
    if (event.type === "message") this.#serve(event.frames);
    else if (event.type === "send") {
      // A step of the handshake. Its deadline stays.
      if (this.#phase === "greeting") this.#sinceMs = this.#host.clock.now();
      this.#write(event.chunks);
    } else {
      this.#lastRequestMs = this.#host.clock.now();
      this.#enter("idle");
    }
  }

  #serve(frames: readonly Uint8Array[]): void {
    this.#lastRequestMs = this.#host.clock.now();
    this.#enter("idle");
    // REQ puts an empty frame between the route and the message; a DEALER may leave it out.
    const envelope = frames[0]?.byteLength === 0 ? frames.slice(0, 1) : [];
    try {
      const answered = this.#answer(frames.slice(envelope.length));
      if (answered instanceof Promise) void this.#replyLater(envelope, answered);
      else if (answered !== undefined)
        this.#write(this.#session.encode([...envelope, ...answered]));
    } catch (error) {
      this.#complainOfRequest(error);
    }
  }

  async #replyLater(
    envelope: readonly Uint8Array[],
    answer: Promise<readonly Uint8Array[] | undefined>,
  ): Promise<void> {
    this.#enter("answering");
    this.#host.answering(1);
    try {
      const answered = await answer;
      if (this.#closed) return;
      this.#enter("idle");
      if (answered !== undefined) this.#write(this.#session.encode([...envelope, ...answered]));
    } catch (error) {
      this.#complainOfRequest(error);
      if (!this.#closed) this.#enter("idle");
    } finally {
      this.#host.answering(-1);
    }
    this.pump();
  }

  #complainOfRequest(error: unknown): void {
    const reason = KvError.is(error) ? error.code : "failed";
    this.#host.complain("side-channel-request-refused", reason, {
      peer: this.address,
      reason: reasonOf(error),
    });
  }

  #write(chunks: readonly Uint8Array[]): void {
    const [first] = chunks;
    if (chunks.length > 1) this.#socket.cork();
    for (const chunk of chunks) this.#socket.write(chunk, this.#flushed);
    if (chunks.length > 1) this.#socket.uncork();
    if (first === undefined || this.#phase === "greeting" || this.#socket.writableLength === 0)
      return;
    this.#enter("sending");
    this.#host.sending(this);
  }
}
