import {
  createServer as createHttpServer,
  type IncomingMessage,
  type Server,
  type ServerResponse,
} from "node:http";
import { createServer as createHttpsServer, type ServerOptions } from "node:https";
import type { AddressInfo, Server as NetServer, Socket } from "node:net";
import { type Clock, KvError, YieldingQueue } from "@kv/interface";
import { refusedRequest } from "./answers/client-error.js";
import {
  type ErrorAnswer,
  errorAnswer,
  refuseConnection,
  sendEarlyError,
  sendParserError,
  writeError,
} from "./answers/error-response.js";
import {
  BodyBudget,
  type BodyQueues,
  type ReceivedBody,
  readJsonBody,
} from "./bodies/read-body.js";
import type { Certificate, CertificatePair } from "./certificate.js";
import { ClientConnections } from "./connections/client-connections.js";
import { parseBody } from "./json/json-pieces.js";
import type { JsonLimits } from "./json/json-reader.js";

/**
 * Limits of connections and of requests' heads. Numbers of connections and requests are read at
 * each use; the rest when the server is made.
 */
export interface HttpConnectionLimits {
  readonly connections: number;
  readonly connectionsPerAddress: number;
  /** Requests of one connection that wait for earlier answers. */
  readonly pipelinedRequests: number;
  readonly headersLengthBytes: number;
  /** Time for a head, in ms. */
  readonly headersMs: number;
  /** Time for a whole request, in ms. */
  readonly receiveMs: number;
  /** How long a connection stays open without a request, in ms. */
  readonly keepAliveMs: number;
}

/** Limits of bodies. */
export interface HttpBodyLimits extends JsonLimits {
  readonly bodyLengthBytes: number;
  readonly bodiesLengthBytes: number;
  readonly bodiesPerClientLengthBytes: number;
}

/** Options of an `HttpServer`. */
export interface HttpServerOptions {
  readonly limits: HttpConnectionLimits;
  /** Without them, no body is read. */
  readonly bodies?: HttpBodyLimits | undefined;
  /** Reads every content type as JSON; else others get 415. */
  readonly anyContentType?: true | undefined;
  readonly clock: Clock;
  /** Where long bodies wait to be parsed. @default a queue of this server */
  readonly parses?: YieldingQueue | undefined;
  /** With it, clients speak TLS. */
  readonly certificate?: Certificate | undefined;
  /** Answers a request. Thrown errors go to `answerError`. */
  readonly serve: (turn: Turn) => Promise<void>;
  /** Also for errors of connections and of the parser. @default errorAnswer */
  readonly answerError?: ((error: KvError) => ErrorAnswer) | undefined;
}

/** A request whose turn it is. */
export interface Turn {
  /** Read its body with `readBody` or `withJson`. */
  readonly request: IncomingMessage;
  /** The connection's next request waits until it has closed. */
  readonly response: ServerResponse;
  /** The client's address, unless `serve` knows better. */
  readonly client: string;
  readonly path: string;
  readonly query: string;
  /** The client waits for `100 Continue`. */
  readonly expectsContinue: boolean;
}

/** An HTTP server with limits, with or without TLS. */
export class HttpServer {
  readonly #server: Server;
  readonly #connections: ClientConnections;
  readonly #budget: BodyBudget;
  readonly #queues: BodyQueues;
  readonly #answerError: (error: KvError) => ErrorAnswer;

  constructor(private readonly options: HttpServerOptions) {
    const { limits, bodies, certificate, clock } = options;
    this.#answerError = options.answerError ?? errorAnswer;
    this.#budget = new BodyBudget(
      bodies ?? { bodiesLengthBytes: 0, bodiesPerClientLengthBytes: 0 },
    );
    this.#queues = {
      reads: new YieldingQueue({ clock, stepsPerTurn: 4 }),
      parses: options.parses ?? new YieldingQueue({ clock }),
    };
    this.#connections = new ClientConnections({
      limits,
      refuse: (socket, error, answer) => refuseConnection(socket, this.#answerError(error), answer),
    });
    const headersTimeout = Math.min(limits.headersMs, limits.receiveMs);
    this.#server = createPlainOrTls(certificate, {
      maxHeaderSize: limits.headersLengthBytes,
      headersTimeout,
      requestTimeout: limits.receiveMs,
      keepAliveTimeout: limits.keepAliveMs,
      // Node's default is 30 s.
      connectionsCheckingInterval: Math.ceil(Math.min(30_000, headersTimeout / 4)),
      handshakeTimeout: headersTimeout,
    });
    // Limits the TLS handshakes under way. `ClientConnections` limits the rest.
    if (certificate !== undefined) this.#server.maxConnections = 2 * limits.connections;
    const connected = certificate === undefined ? "connection" : "secureConnection";
    this.#server.on(connected, (socket: Socket) => this.#connections.accept(socket));
    this.#server.on("request", (request, response) => this.#accept(request, response, false));
    this.#server.on("checkContinue", (request, response) => this.#accept(request, response, true));
    this.#server.on("clientError", (error, socket) =>
      sendParserError(error, socket as Socket, this.#answerError, clock),
    );
  }

  /**
   * Starts to listen and resolves with the port.
   * @throws As `listen`.
   */
  async listen(host: string, port: number): Promise<number> {
    await this.options.certificate?.ready();
    return listen(this.#server, host, port);
  }

  /**
   * Idle connections end at once, the others after their answer or `graceMs`. `Infinity` sets no
   * end.
   */
  async close(graceMs = 0): Promise<void> {
    const closed = new Promise<void>((resolve) => this.#server.close(() => resolve()));
    this.#server.closeIdleConnections();
    this.#connections.close();
    if (graceMs === 0) this.endConnections();
    const timer =
      graceMs > 0 && graceMs < Number.POSITIVE_INFINITY
        ? this.options.clock.setTimer(() => this.endConnections(), graceMs)
        : undefined;
    await closed;
    timer?.cancel();
  }

  endConnections(): void {
    this.#server.closeAllConnections();
  }

  /**
   * Reads the body of a request, whose share the caller ends.
   * @throws `KV_REQUEST_INVALID` (413, 415, or JSON above the limits); `KV_PROXY_OVERLOADED`
   * without memory; `KV_REQUEST_ABORTED` when the client disconnects.
   */
  async readBody({ request, response, client, expectsContinue }: Turn): Promise<ReceivedBody> {
    const { bodies, anyContentType } = this.options;
    if (bodies === undefined)
      throw new KvError("KV_INTERNAL", "this server has no limits for bodies");
    const body = await readJsonBody(request, {
      limits: bodies,
      anyContentType,
      budget: this.#budget,
      queues: this.#queues,
      client,
      onAccepted: expectsContinue ? () => response.writeContinue() : undefined,
    });
    this.#connections.received(request.socket);
    return body;
  }

  /**
   * Calls `use` with the parsed body. Its bytes count until `use` ends.
   * @throws As `readBody`, and `KV_REQUEST_INVALID` for what is not JSON.
   */
  async withJson<T>(turn: Turn, use: (value: unknown) => T | Promise<T>): Promise<T> {
    const body = await this.readBody(turn);
    try {
      return await use(await parseBody(body.take(), this.#queues.parses));
    } finally {
      body.share.end();
    }
  }

  #accept(request: IncomingMessage, response: ServerResponse, expectsContinue: boolean): void {
    this.#connections.takeTurn(
      request,
      response,
      () => void this.#serve(request, response, expectsContinue),
    );
  }

  async #serve(
    request: IncomingMessage,
    response: ServerResponse,
    expectsContinue: boolean,
  ): Promise<void> {
    const { socket, headers } = request;
    // A disconnect is also an error of the response; `close` is enough.
    response.on("error", nothing);
    try {
      checkRequestHead(request, response);
      if (headers["transfer-encoding"] === undefined && !(Number(headers["content-length"]) > 0))
        this.#connections.received(socket);
      const client = this.#connections.addressOf(socket);
      const { host, ...target } = targetOf(request.url ?? "");
      // The target's host replaces the header (RFC 9112, 3.2.2).
      if (host !== undefined) headers.host = host;
      await this.options.serve({ request, response, client, ...target, expectsContinue });
    } catch (thrown) {
      const error = KvError.from(thrown, "KV_INTERNAL", "the server failed");
      const answer = this.#answerError(error);
      if (response.headersSent || response.destroyed) response.destroy();
      else if (request.complete) {
        writeError(response, answer);
        response.end();
      } else sendEarlyError(request, response, error, answer, this.options.clock);
    }
  }
}

const nothing = () => {};

/**
 * Refuses heads that Node accepts but another server may read differently: two `Host` headers,
 * another major HTTP version, a transfer coding besides `chunked`, or any in HTTP/1.0.
 * @throws `KV_REQUEST_INVALID`; the answer closes the connection.
 */
function checkRequestHead(request: IncomingMessage, response: ServerResponse): void {
  const error = refusalOf(request);
  if (error === undefined) return;
  // Another server may see another end of this request.
  response.setHeader("connection", "close");
  throw error;
}

function refusalOf(request: IncomingMessage): KvError | undefined {
  const { httpVersionMajor, httpVersionMinor, rawHeaders } = request;
  if (httpVersionMajor !== 1)
    return refusedRequest(505, `HTTP/${request.httpVersion} is not served here`, "send HTTP/1.1");
  let hosts = 0;
  for (let at = 0; at < rawHeaders.length; at += 2) {
    const name = rawHeaders[at];
    if (name?.length === 4 && name.toLowerCase() === "host") hosts += 1;
  }
  if (hosts > 1) return refusedRequest(400, `the request has ${hosts} Host headers`, "send one");
  const coding = request.headers["transfer-encoding"];
  if (coding === undefined) return undefined;
  if (httpVersionMinor === 0)
    return refusedRequest(
      400,
      "a request in HTTP/1.0 has a transfer coding",
      "send content-length",
    );
  if (coding.trim().toLowerCase() !== "chunked")
    return refusedRequest(
      501,
      "the request has a transfer coding besides chunked",
      "send chunked, or content-length",
    );
  return undefined;
}

/** Splits a target in origin form or absolute form (RFC 9112, 3.2). */
function targetOf(url: string) {
  const [absolute = "", host] = /^https?:\/\/([^/?#]*)/i.exec(url) ?? [];
  const target = url.slice(absolute.length);
  const at = target.indexOf("?");
  const path = at === -1 ? target : target.slice(0, at);
  return { host, path: path === "" ? "/" : path, query: at === -1 ? "" : target.slice(at) };
}

function createPlainOrTls(certificate: Certificate | undefined, options: ServerOptions): Server {
  if (certificate === undefined) return createHttpServer(options);
  const secure = ({ certificate: cert, privateKey: key }: CertificatePair) => ({ cert, key });
  const server = createHttpsServer(options);
  certificate.onChange((pair) => server.setSecureContext(secure(pair)));
  return server;
}

/**
 * Starts to listen and resolves with the port.
 * @throws `KV_CONFIG_INVALID` when the port is taken or the host is not of this machine.
 */
export async function listen(server: NetServer, host: string, port: number): Promise<number> {
  await new Promise<void>((resolve, reject) => {
    const fail = (cause: NodeJS.ErrnoException) => {
      const hint =
        cause.code === "EADDRINUSE"
          ? "stop the program that listens there, or choose another port (0 takes a free one)"
          : "choose a host and a port of this machine";
      const message = `cannot listen on ${host}:${port} (${cause.code ?? cause.message})`;
      reject(new KvError("KV_CONFIG_INVALID", message, { hint, cause }));
    };
    server.once("error", fail);
    server.listen({ host, port }, () => {
      server.removeListener("error", fail);
      resolve();
    });
  });
  return (server.address() as AddressInfo).port;
}

/** `http://HOST:PORT`, with brackets for IPv6. */
export function httpUrl(host: string, port: number): string {
  return `http://${host.includes(":") ? `[${host}]` : host}:${port}`;
}
