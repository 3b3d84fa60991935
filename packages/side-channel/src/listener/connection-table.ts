import type { Socket } from "node:net";
import {
  type Clock,
  type Log,
  remoteAddressKey,
  type SideChannelListenOptions,
  type Timer,
} from "@kv/interface";
import type { CurveKeySource } from "../keys/curve.js";
import { LimitedWarnings } from "./limited-warnings.js";
import type { SideChannelLimits } from "./limits.js";
import { type ConnectionHost, ServedConnection } from "./served-connection.js";

/** Events of all connections that are handled before HTTP and timers have their turn. */
const EVENTS_PER_TURN = 64;
/** How often deadlines are checked. */
const CHECK_MS = 250;

/**
 * The connections to the listeners of one side channel, within their limits. Connections that have
 * something to do take turns.
 */
export class ConnectionTable implements ConnectionHost {
  readonly clock: Clock;
  readonly limits: SideChannelLimits;
  readonly #warnings: LimitedWarnings;
  readonly #byAddress = new Map<string, Set<ServedConnection>>();
  #size = 0;
  #checks: Timer | undefined;
  readonly #waiting = new Set<ServedConnection>();
  #eventsLeft = EVENTS_PER_TURN;
  #turnIsSet = false;
  #answering = 0;
  /** Connections whose peers have not taken their replies, the oldest first. */
  readonly #sending = new Set<ServedConnection>();

  constructor(clock: Clock, log: Log, limits: SideChannelLimits) {
    this.clock = clock;
    this.limits = limits;
    this.#warnings = new LimitedWarnings(clock, log);
  }

  /** Serves an accepted connection, or closes it when there is no room for it. */
  admit(socket: Socket, answer: SideChannelListenOptions["answer"], curve: CurveKeySource): void {
    // It is undefined when the peer has closed the connection already.
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

  complain(event: string, reason: string, fields: Readonly<Record<string, unknown>>): void {
    this.#warnings.warn(event, reason, fields);
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
    this.complain("side-channel-full", "full", fields);
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
    this.#eventsLeft = EVENTS_PER_TURN;
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
