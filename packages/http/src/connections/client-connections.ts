import type { IncomingMessage, ServerResponse } from "node:http";
import type { Socket } from "node:net";
import { type KvError, remoteAddressKey } from "@kv/interface";
import { overloaded } from "../answers/overloaded.js";
import { type Member, MemberList } from "./member-list.js";

export interface ClientConnectionsOptions {
  /** Connections of all addresses together. */
  readonly all: number;
  readonly perAddress: number;
  /** Requests of one connection that wait for the answers of those before them. */
  readonly pipelined: number;
  /**
   * Ends a connection with an error. `answer`: nothing of another answer has left, so the error can
   * be sent.
   */
  readonly refuse: (socket: Socket, error: KvError, answer: boolean) => void;
}

interface Connection {
  readonly socket: Socket;
  readonly address: string;
  /** The response of the request whose turn it is. */
  current: ServerResponse | undefined;
  /** Where it waits among the idle ones of its address. */
  idle: Member<Connection> | undefined;
  /** Requests that wait for their turn. */
  readonly waiting: (() => void)[];
}

interface AddressConnections {
  count: number;
  /**
   * Connections without a request that has arrived: idle, or still sending. The oldest is first.
   */
  readonly idle: MemberList<Connection>;
}

/**
 * The connections of a server: how many there are, and one request of each at a time. When a limit
 * is reached, a new connection takes the place of the oldest one without a complete request, so a
 * client that holds connections and sends nothing does not keep others out. A connection whose
 * request is being served never loses its place.
 */
export class ClientConnections {
  readonly #options: ClientConnectionsOptions;
  readonly #bySocket = new WeakMap<Socket, Connection>();
  readonly #byAddress = new Map<string, AddressConnections>();
  #count = 0;
  #isClosing = false;

  constructor(options: ClientConnectionsOptions) {
    this.#options = options;
  }

  /** Takes a new connection, or refuses it. Returns whether it was taken. */
  accept(socket: Socket): boolean {
    const address = this.addressOf(socket);
    const { all, perAddress, refuse } = this.#options;
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

  /** The client behind a connection, as limits per address count it. */
  addressOf(socket: Socket): string {
    return this.#bySocket.get(socket)?.address ?? remoteAddressKey(socket.remoteAddress ?? "local");
  }

  /**
   * Calls `serve` when the answers to all earlier requests of the connection have ended. A
   * connection that sends too many requests ahead is refused.
   */
  takeTurn(request: IncomingMessage, response: ServerResponse, serve: () => void): void {
    const connection = this.#bySocket.get(request.socket);
    // The connection was refused while its request was on the way.
    if (connection === undefined) return;
    if (connection.current === undefined) {
      this.#begin(connection, response, serve);
      return;
    }
    const { pipelined, refuse } = this.#options;
    if (connection.waiting.length < pipelined) {
      connection.waiting.push(() => this.#begin(connection, response, serve));
      return;
    }
    const answer = !connection.current.headersSent;
    this.#forget(connection);
    refuse(connection.socket, tooManyPipelined(pipelined), answer);
  }

  /**
   * The whole request has arrived: from now on, the connection keeps its place until the answer has
   * ended.
   */
  received(socket: Socket): void {
    const connection = this.#bySocket.get(socket);
    if (connection !== undefined) this.#notIdle(connection);
  }

  /**
   * Ends the connections on which nothing has come, and each other one when it has no request any
   * more.
   */
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

  /** The address with the most connections of those that have an idle one. */
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
 * Clients without a request that are kept: a table whose entries come and go with each request is
 * built anew all the time, and ends in the old heap.
 */
const KEPT_CLIENTS = 1024;

export interface RequestsInFlightOptions {
  /** Requests of all clients together. */
  readonly all: number;
  readonly perClient: number;
}

/**
 * Counts the requests that are being served, in all and per client. A request that is split counts
 * once for each part.
 */
export class RequestsInFlight {
  readonly #options: RequestsInFlightOptions;
  readonly #byClient = new Map<string, number>();
  #count = 0;

  constructor(options: RequestsInFlightOptions) {
    this.#options = options;
  }

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
    const { all, perClient } = this.#options;
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

/** The place of one request among those in flight. */
export class RequestSlot {
  readonly #add: (by: number) => void;
  #held = 0;

  constructor(add: (by: number) => void) {
    this.#add = add;
  }

  /**
   * Takes more places, for further parts.
   * @throws `KV_PROXY_OVERLOADED`; no place is taken then.
   */
  grow(by: number): void {
    this.#add(by);
    this.#held += by;
  }

  /** Gives all places back. */
  end(): void {
    if (this.#held > 0) this.#add(-this.#held);
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
