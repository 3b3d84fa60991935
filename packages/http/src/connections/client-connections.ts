import type { IncomingMessage, ServerResponse } from "node:http";
import type { Socket } from "node:net";
import { type KvError, remoteAddressKey } from "@kv/interface";
import { overloaded } from "../answers/client-error.js";

export interface ClientConnectionsOptions {
  /** Read at each use, so that they may change. */
  readonly limits: {
    readonly connections: number;
    readonly connectionsPerAddress: number;
    /** Requests of one connection that may wait for earlier answers. */
    readonly pipelinedRequests: number;
  };
  /** `answer`: no part of another answer was sent, so the error can be sent. */
  readonly refuse: (socket: Socket, error: KvError, answer: boolean) => void;
}

interface Connection {
  readonly socket: Socket;
  readonly address: string;
  current: ServerResponse | undefined;
  idle: Member<Connection> | undefined;
  readonly waiting: (() => void)[];
}

interface AddressConnections {
  count: number;
  /** Connections without a complete request, oldest first. */
  readonly idle: MemberList<Connection>;
}

/**
 * Limits the connections of a server and serves one request of each at a time. At a limit, a new
 * connection replaces the oldest one without a complete request, so silent clients keep nobody out.
 * A connection whose request is being served is never replaced.
 */
export class ClientConnections {
  readonly #bySocket = new WeakMap<Socket, Connection>();
  readonly #byAddress = new Map<string, AddressConnections>();
  #count = 0;
  #isClosing = false;

  constructor(private readonly options: ClientConnectionsOptions) {}

  /** Returns whether the connection was taken. */
  accept(socket: Socket): boolean {
    const address = this.addressOf(socket);
    const { limits, refuse } = this.options;
    const { connections: all, connectionsPerAddress: perAddress } = limits;
    const own = this.#byAddress.get(address);
    const byClient = (own?.count ?? 0) >= perAddress;
    if (byClient || this.#count >= all) {
      const victim = (byClient ? own : this.#largestWithIdle())?.idle.oldest;
      const error = byClient ? tooManyOfAddress(perAddress) : tooMany(all);
      if (victim === undefined) {
        refuse(socket, error, true);
        return false;
      }
      this.#forget(victim);
      refuse(victim.socket, error, victim.current?.headersSent !== true);
    }
    const connection: Connection = {
      socket,
      address,
      current: undefined,
      idle: undefined,
      waiting: [],
    };
    const group = this.#byAddress.get(address) ?? { count: 0, idle: new MemberList() };
    this.#byAddress.set(address, group);
    group.count += 1;
    connection.idle = group.idle.join(connection);
    this.#count += 1;
    this.#bySocket.set(socket, connection);
    socket.once("close", () => this.#forget(connection));
    return true;
  }

  addressOf(socket: Socket): string {
    return this.#bySocket.get(socket)?.address ?? remoteAddressKey(socket.remoteAddress ?? "local");
  }

  /**
   * Calls `serve` after all earlier answers of the connection. Refuses a connection with too many
   * waiting requests.
   */
  takeTurn(request: IncomingMessage, response: ServerResponse, serve: () => void): void {
    const connection = this.#bySocket.get(request.socket);
    // The connection was refused before its request came.
    if (connection === undefined) return;
    if (connection.current === undefined) {
      this.#begin(connection, response, serve);
      return;
    }
    const { limits, refuse } = this.options;
    const { pipelinedRequests: pipelined } = limits;
    if (connection.waiting.length < pipelined) {
      connection.waiting.push(() => this.#begin(connection, response, serve));
      return;
    }
    const answer = !connection.current.headersSent;
    this.#forget(connection);
    refuse(connection.socket, tooManyPipelined(pipelined), answer);
  }

  /** The connection cannot be replaced until the answer has ended. */
  received(socket: Socket): void {
    const connection = this.#bySocket.get(socket);
    if (connection !== undefined) this.#notIdle(connection);
  }

  /** Ends idle connections at once, the others after their last request. */
  close(): void {
    this.#isClosing = true;
    for (const { idle } of this.#byAddress.values())
      for (const { socket } of idle.values()) if (socket.bytesRead === 0) socket.destroy();
  }

  #begin(connection: Connection, response: ServerResponse, serve: () => void): void {
    connection.current = response;
    response.once("close", () => {
      connection.current = undefined;
      const { socket } = connection;
      if (socket.destroyed || socket.writableEnded || this.#bySocket.get(socket) !== connection)
        return;
      connection.idle ??= this.#byAddress.get(connection.address)?.idle.join(connection);
      const next = connection.waiting.shift();
      if (next !== undefined) next();
      else if (this.#isClosing) socket.destroySoon();
    });
    serve();
  }

  #notIdle(connection: Connection): void {
    if (connection.idle !== undefined)
      this.#byAddress.get(connection.address)?.idle.leave(connection.idle);
    connection.idle = undefined;
  }

  #forget(connection: Connection): void {
    if (!this.#bySocket.delete(connection.socket)) return;
    connection.waiting.length = 0;
    this.#count -= 1;
    const group = this.#byAddress.get(connection.address);
    if (group === undefined) return;
    this.#notIdle(connection);
    group.count -= 1;
    if (group.count === 0) this.#byAddress.delete(connection.address);
  }

  #largestWithIdle(): AddressConnections | undefined {
    let largest: AddressConnections | undefined;
    for (const group of this.#byAddress.values()) {
      if (group.idle.size > 0 && group.count > (largest?.count ?? 0)) largest = group;
    }
    return largest;
  }
}

const tooMany = (all: number) =>
  overloaded({
    limit: "limits.connections",
    message: `there are ${all} connections, which is the limit`,
    byClient: false,
  });

const tooManyOfAddress = (perAddress: number) =>
  overloaded({
    limit: "limits.connectionsPerAddress",
    message: `there are ${perAddress} connections from this address, which is the limit`,
    byClient: true,
    hint: "close connections that are not in use; limits.connectionsPerAddress sets the limit",
  });

const tooManyPipelined = (pipelined: number) =>
  overloaded({
    limit: "limits.pipelinedRequests",
    message: `more than ${pipelined} requests were sent ahead on one connection`,
    byClient: true,
    hint: "wait for answers before sending more, or use several connections",
  });

/**
 * Keeps clients without requests. Else V8 would rebuild the table all the time and move it to the
 * old heap.
 */
const KEPT_CLIENTS = 1024;

/** Read at each use, so that they may change. */
export interface RequestLimits {
  readonly requestsInFlight: number;
  readonly requestsPerClient: number;
}

/** Counts requests in service, in all and per client. A split request counts once per part. */
export class RequestsInFlight {
  readonly #byClient = new Map<string, number>();
  #count = 0;

  constructor(private readonly limits: RequestLimits) {}

  /**
   * Admits a request. The caller ends the slot.
   * @throws `KV_PROXY_OVERLOADED`, 429 or 503.
   */
  admit(client: string): RequestSlot {
    const slot = new RequestSlot((by) => this.#add(client, by));
    slot.grow(1);
    return slot;
  }

  #add(client: string, by: number): void {
    const { requestsInFlight: all, requestsPerClient: perClient } = this.limits;
    const own = (this.#byClient.get(client) ?? 0) + by;
    if (by > 0 && own > perClient)
      throw tooManyRequests("limits.requestsPerClient", perClient, true);
    if (by > 0 && this.#count + by > all)
      throw tooManyRequests("limits.requestsInFlight", all, false);
    this.#count += by;
    if (own === 0 && this.#byClient.size > KEPT_CLIENTS) this.#byClient.delete(client);
    else this.#byClient.set(client, own);
  }
}

/** One request's places among those in flight. */
export class RequestSlot {
  #held = 0;

  constructor(private readonly add: (by: number) => void) {}

  /**
   * Takes more places, for further parts.
   * @throws `KV_PROXY_OVERLOADED`; then it takes none.
   */
  grow(by: number): void {
    this.add(by);
    this.#held += by;
  }

  end(): void {
    if (this.#held > 0) this.add(-this.#held);
    this.#held = 0;
  }
}

function tooManyRequests(limit: string, count: number, byClient: boolean) {
  const whose = byClient ? "of this client are in flight" : "are in flight";
  return overloaded({
    limit,
    message: `${count} requests ${whose}, which is the limit; each prompt and copy of a request counts`,
    byClient,
  });
}

/** The place of a member in a `MemberList`. */
export interface Member<T> {
  /** Undefined once the member has left. */
  value: T | undefined;
  before: Member<T> | undefined;
  after: Member<T> | undefined;
}

/**
 * A list in order of joining, for short-lived members. V8's `Set` rebuilds its table, and old
 * tables keep later ones and their requests alive: at 5,000 requests per second the old generation
 * grew by 7 MB per second. A member that has left this list refers to nothing.
 */
export class MemberList<T> {
  #first: Member<T> | undefined;
  #last: Member<T> | undefined;
  #size = 0;

  get size(): number {
    return this.#size;
  }

  get oldest(): T | undefined {
    return this.#first?.value;
  }

  join(value: T): Member<T> {
    const member: Member<T> = { value, before: this.#last, after: undefined };
    if (this.#last === undefined) this.#first = member;
    else this.#last.after = member;
    this.#last = member;
    this.#size += 1;
    return member;
  }

  leave(member: Member<T>): void {
    if (member.value === undefined) return;
    const { before, after } = member;
    if (before === undefined) this.#first = after;
    else before.after = after;
    if (after === undefined) this.#last = before;
    else after.before = before;
    member.value = member.before = member.after = undefined;
    this.#size -= 1;
  }

  /** The present members, oldest first. */
  values(): T[] {
    const values: T[] = [];
    for (let member = this.#first; member !== undefined; member = member.after)
      if (member.value !== undefined) values.push(member.value);
    return values;
  }
}
