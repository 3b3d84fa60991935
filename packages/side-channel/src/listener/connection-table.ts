import type { Socket } from "node:net";
import { type Clock, KvError, type Log, remoteAddressKey, type Timer } from "@kv/interface";
import { CURVE_HINT, type CurveKeySource, isAboutCurve, OTHER_MECHANISM } from "../keys.js";
import { reasonOf } from "../zmq-endpoint.js";
import { curveServer } from "../zmtp/curve.js";
import { type ZmtpEvent, ZmtpSession } from "../zmtp/session.js";
import { LimitedWarnings, type SideChannelLimits } from "./limits.js";

/** All connections together handle these before HTTP and timers have their turn. */
const EVENTS_PER_TABLE_TURN = 64;
const CHECK_MS = 250;

/** The connections to one side channel's listeners, within limits. Busy connections take turns. */
export class ConnectionTable {
  readonly clock: Clock;
  readonly limits: SideChannelLimits;
  readonly warnings: LimitedWarnings;
  readonly #byAddress = new Map<string, Set<ServedConnection>>();
  #size = 0;
  #checks: Timer | undefined;
  readonly #waiting = new Set<ServedConnection>();
  #eventsLeft = EVENTS_PER_TABLE_TURN;
  #turnIsSet = false;
  #answering = 0;
  /** Peers have not taken their replies; oldest first. */
  readonly #sending = new Set<ServedConnection>();

  constructor(clock: Clock, log: Log, limits: SideChannelLimits) {
    this.clock = clock;
    this.limits = limits;
    this.warnings = new LimitedWarnings(clock, log);
  }

  admit(socket: Socket, answer: Answer, curve: CurveKeySource): void {
    // Undefined when the peer has closed the connection.
    const address = remoteAddressKey(socket.remoteAddress ?? "");
    if (address === "" || !this.#makeRoom(address)) {
      socket.destroy();
      return;
    }
    const connection = new ServedConnection(socket, address, answer, curve, this);
    const peers = this.#byAddress.get(address);
    if (peers === undefined) this.#byAddress.set(address, new Set([connection]));
    else peers.add(connection);
    this.#size += 1;
    this.#checks ??= this.clock.setTimer(() => this.#checkDeadlines(), CHECK_MS);
  }

  /** False: its `pump` is called later. */
  mayProceed(connection: ServedConnection): boolean {
    if (this.#eventsLeft > 0 && !this.#mustWait(connection)) {
      this.#eventsLeft -= 1;
      this.#setTurn();
      return true;
    }
    this.later(connection);
    return false;
  }

  later(connection: ServedConnection): void {
    this.#waiting.add(connection);
    this.#setTurn();
  }

  answering(change: 1 | -1): void {
    this.#answering += change;
    if (this.#waiting.size > 0) this.#setTurn();
  }

  /** The peer has not taken all written bytes. */
  sending(connection: ServedConnection): void {
    this.#sending.add(connection);
    let queued = 0;
    for (const each of this.#sending) queued += each.queuedBytes;
    for (const oldest of this.#sending) {
      if (queued <= this.limits.maxQueuedBytes || this.#sending.size === 1) return;
      queued -= oldest.queuedBytes;
      oldest.refuse("unread-replies", { queuedBytes: oldest.queuedBytes });
    }
  }

  sent(connection: ServedConnection): void {
    this.#sending.delete(connection);
  }

  closed(connection: ServedConnection): void {
    this.#waiting.delete(connection);
    this.#sending.delete(connection);
    const peers = this.#byAddress.get(connection.address);
    if (peers?.delete(connection) !== true) return;
    this.#size -= 1;
    if (peers.size === 0) this.#byAddress.delete(connection.address);
  }

  #makeRoom(address: string): boolean {
    const { maxConnections, maxConnectionsPerAddress } = this.limits;
    const peers = this.#byAddress.get(address);
    let crowd: Set<ServedConnection> | undefined;
    if (peers !== undefined && peers.size >= maxConnectionsPerAddress) crowd = peers;
    else if (this.#size >= maxConnections) {
      for (const each of this.#byAddress.values())
        if (crowd === undefined || each.size > crowd.size) crowd = each;
    }
    if (crowd === undefined) return true;
    const limit = crowd === peers ? maxConnectionsPerAddress : maxConnections;
    const fields = { peer: address, connections: crowd.size, limit };
    this.warnings.warn("side-channel-full", "full", fields);
    const victim = longestWaiting(crowd);
    victim?.close();
    return victim !== undefined;
  }

  #setTurn(): void {
    if (this.#turnIsSet) return;
    this.#turnIsSet = true;
    setImmediate(() => this.#turn());
  }

  #turn(): void {
    this.#turnIsSet = false;
    this.#eventsLeft = EVENTS_PER_TABLE_TURN;
    for (const connection of this.#waiting) {
      if (this.#eventsLeft === 0) {
        this.#setTurn();
        return;
      }
      if (this.#mustWait(connection)) continue;
      this.#waiting.delete(connection);
      connection.pump();
    }
  }

  #mustWait(connection: ServedConnection): boolean {
    return connection.mayAsk && this.#answering >= this.limits.maxPending;
  }

  #checkDeadlines(): void {
    const now = this.clock.now();
    for (const peers of this.#byAddress.values())
      for (const connection of peers) connection.checkDeadline(now);
    this.#checks =
      this.#size === 0 ? undefined : this.clock.setTimer(() => this.#checkDeadlines(), CHECK_MS);
  }
}

function longestWaiting(connections: Iterable<ServedConnection>): ServedConnection | undefined {
  let best: ServedConnection | undefined;
  let bestRank = Number.POSITIVE_INFINITY;
  for (const connection of connections) {
    const rank = connection.evictionRank;
    if (rank > bestRank || (rank === bestRank && connection.sinceMs >= (best?.sinceMs ?? 0)))
      continue;
    best = connection;
    bestRank = rank;
  }
  return best;
}

/**
 * What a connection waits for: the greeting, its next request, the rest of one, its turn, `answer`,
 * or the peer to read.
 */
type Phase = "greeting" | "idle" | "receiving" | "waiting" | "answering" | "sending";

/**
 * First to make room: connections that wait for their peers, then those that wait for their turn.
 * One that is being answered stays.
 */
const EVICTION_RANK: Readonly<Record<Phase, number>> = {
  idle: 0,
  greeting: 0,
  receiving: 0,
  sending: 0,
  waiting: 1,
  answering: Number.POSITIVE_INFINITY,
};

/** A connection handles these before others have their turn. */
const EVENTS_PER_TURN = 16;

/** The ROUTER's end of a connection: answers its requests in order. */
class ServedConnection implements ZmqPeer {
  readonly address: string;
  readonly #socket: Socket;
  readonly #table: ConnectionTable;
  readonly #answer: Answer;
  readonly #session: ZmtpSession;
  #phase: Phase = "greeting";
  #sinceMs: number;
  #deadlineMs: number;
  #lastRequestMs = 0;
  #closed = false;
  readonly #flushed = () => {
    if (this.#closed || this.#phase !== "sending" || this.#socket.writableLength > 0) return;
    this.#table.sent(this);
    this.#enter("idle");
    this.pump();
  };

  constructor(
    socket: Socket,
    address: string,
    answer: Answer,
    curve: CurveKeySource,
    table: ConnectionTable,
  ) {
    const { limits, clock } = table;
    this.address = address;
    this.#socket = socket;
    this.#table = table;
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

  get identity(): string {
    return this.#session.peerIdentity;
  }

  get isOpen(): boolean {
    return !this.#closed;
  }

  get queuedBytes(): number {
    return this.#socket.writableLength;
  }

  /** Its next event may be a request, which must wait at the limit of answers. */
  get mayAsk(): boolean {
    return this.#phase !== "greeting";
  }

  /** Lower ranks make room first; infinite: never. */
  get evictionRank(): number {
    return EVICTION_RANK[this.#phase];
  }

  get sinceMs(): number {
    return this.#sinceMs;
  }

  checkDeadline(nowMs: number): void {
    if (nowMs < this.#deadlineMs) return;
    if (this.#phase === "idle") this.close();
    else
      this.refuse("slow", { waitedForMs: Math.round(nowMs - this.#sinceMs), phase: this.#phase });
  }

  refuse(reason: string, fields: Readonly<Record<string, unknown>> = {}): void {
    if (this.#closed) return;
    this.#table.warnings.warn("side-channel-connection-closed", reason, {
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
    this.#table.closed(this);
  }

  /** Handles input up to a request to wait for, or until others have their turn. */
  pump(): void {
    if (this.#busy) return;
    try {
      for (let events = 0; this.#session.unread; events += 1) {
        if (events >= EVENTS_PER_TURN || !this.#table.mayProceed(this)) {
          if (events >= EVENTS_PER_TURN) this.#table.later(this);
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
    // The rest waits in the socket until earlier input is read.
    if (this.#session.unread) this.#socket.pause();
    this.#session.push(chunk);
    if (this.#phase !== "waiting") this.pump();
  }

  #rest(): void {
    if (this.#socket.isPaused()) this.#socket.resume();
    if (this.#phase === "greeting") return;
    const phase = this.#session.partial ? "receiving" : "idle";
    if (this.#phase !== phase) this.#enter(phase);
  }

  #enter(phase: Phase): void {
    const { clock, limits } = this.#table;
    this.#phase = phase;
    // A heartbeat must not end idleness.
    this.#sinceMs = phase === "idle" ? this.#lastRequestMs : clock.now();
    if (phase === "idle") this.#deadlineMs = this.#sinceMs + limits.idleTimeoutMs;
    else if (phase === "receiving" || phase === "sending")
      this.#deadlineMs = this.#sinceMs + limits.messageTimeoutMs;
    else this.#deadlineMs = Number.POSITIVE_INFINITY;
  }

  #handle(event: ZmtpEvent): void {
    if (event.type === "message") this.#serve(event.frames);
    else if (event.type === "send") {
      // The handshake's deadline stays.
      if (this.#phase === "greeting") this.#sinceMs = this.#table.clock.now();
      this.#write(event.chunks);
    } else {
      this.#lastRequestMs = this.#table.clock.now();
      this.#enter("idle");
    }
  }

  #serve(frames: readonly Uint8Array[]): void {
    this.#lastRequestMs = this.#table.clock.now();
    this.#enter("idle");
    // REQ puts an empty frame before the message; a DEALER may omit it.
    const envelope = frames[0]?.byteLength === 0 ? frames.slice(0, 1) : [];
    try {
      const answered = this.#answer(frames.slice(envelope.length), this);
      if (answered instanceof Promise) void this.#replyLater(envelope, answered);
      else if (answered !== undefined) this.#write(this.#session.encode(envelope.concat(answered)));
    } catch (error) {
      this.#complainOfRequest(error);
    }
  }

  async #replyLater(
    envelope: readonly Uint8Array[],
    answer: Promise<readonly Uint8Array[] | undefined>,
  ): Promise<void> {
    this.#enter("answering");
    this.#table.answering(1);
    try {
      const answered = await answer;
      if (this.#closed) return;
      this.#enter("idle");
      if (answered !== undefined) this.#write(this.#session.encode(envelope.concat(answered)));
    } catch (error) {
      this.#complainOfRequest(error);
      if (!this.#closed) this.#enter("idle");
    } finally {
      this.#table.answering(-1);
    }
    this.pump();
  }

  #complainOfRequest(error: unknown): void {
    const reason = KvError.is(error) ? error.code : "failed";
    this.#table.warnings.warn("side-channel-request-refused", reason, {
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
    this.#table.sending(this);
  }
}

/** A connection to a ROUTER: one object for all of its messages. */
export interface ZmqPeer {
  /** The routing id that the peer chose; "" for none. */
  readonly identity: string;
  /** Where the connection comes from; for IPv6, its /64 network. */
  readonly address: string;
  readonly isOpen: boolean;
}

/** Takes a request's untrusted frames; returns the reply's, or undefined for none. */
export type Answer = (
  frames: readonly Uint8Array[],
  from: ZmqPeer,
) => Promise<readonly Uint8Array[] | undefined> | readonly Uint8Array[] | undefined;
