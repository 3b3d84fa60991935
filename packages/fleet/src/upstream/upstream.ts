import type { IncomingHttpHeaders, OutgoingHttpHeaders } from "node:http";
import { type Clock, KvError } from "@kv/interface";
import { buildConnector, Client, type Dispatcher } from "undici";
import type { FailureStage, Role } from "../instances/instance.js";
import type { LazyAbort } from "../request/deadline.js";
import type { RequestBody } from "../request/generation-request.js";
import { BodyQueue } from "./body-queue.js";
import { HOP_BY_HOP } from "./forwarded-headers.js";
import { LongBodies } from "./long-bodies.js";

/** The headers of an instance's answer, names in lower case. */
export type AnswerHeaders = Readonly<Record<string, string | string[] | undefined>>;

/** An HTTP request to an instance. */
export interface UpstreamRequest {
  readonly role: Role;
  readonly url: string;
  readonly method: "GET" | "POST";
  readonly path: string;
  /** Names in lower case. */
  readonly headers: Readonly<Record<string, string | string[]>>;
  readonly body?: RequestBody | undefined;
  /** Closes the connection when it aborts. */
  readonly abort: LazyAbort;
  /**
   * Called when the request begins to leave. Before that call, the instance has received nothing.
   */
  readonly onSent?: (() => void) | undefined;
}

/** The head of an instance's answer, and its body as it arrives. */
export interface UpstreamAnswer {
  readonly status: number;
  /** Names in lower case. */
  readonly headers: AnswerHeaders;
  /** A body that breaks off fails with `KV_PROXY_UPSTREAM_FAILED` at stage `body`. */
  readonly body: BodyQueue;
  /** Closes the connection, unless the answer has ended. */
  discard(): void;
}

/** What an `Upstream` is made of. */
export interface UpstreamOptions extends ConnectionPoolOptions {
  readonly clock: Clock;
}

/**
 * The proxy's HTTP/1.1 client, with kept connections. Its only time limit is the one to connect;
 * callers abort by `abort`.
 */
export class Upstream {
  readonly #connections: ConnectionPool;
  readonly longBodies: LongBodies;
  readonly #targets = new Map<string, { origin: string; prefix: string }>();

  constructor({ clock, ...options }: UpstreamOptions) {
    this.#connections = new ConnectionPool(options);
    this.longBodies = new LongBodies(clock);
  }

  /**
   * Resolves with the head of the answer.
   *
   * @throws `KV_PROXY_UPSTREAM_FAILED` with a `FailureStage` in `details.stage`.
   */
  send(request: UpstreamRequest): Promise<UpstreamAnswer> {
    return new Promise((resolve, reject) => {
      const call = new Call(request, resolve, reject);
      if (request.abort.aborted) {
        call.abort();
        return;
      }
      const { origin, prefix } = this.#target(request.url);
      const { method, path, headers, body } = request;
      call.listenForAbort();
      call.isKept = this.#connections.dispatch(
        origin,
        {
          path: prefix + path,
          method,
          ...(typeof body === "object"
            ? this.longBodies.send(headers, body)
            : { headers, body: body ?? null }),
        },
        call,
      );
    });
  }

  close(): Promise<void> {
    return this.#connections.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #target(url: string) {
    let known = this.#targets.get(url);
    if (known === undefined) {
      const { origin, pathname } = new URL(url);
      known = { origin, prefix: pathname === "/" ? "" : pathname };
      this.#targets.set(url, known);
    }
    return known;
  }
}

/** One request to an instance, from its begin to the last byte of its answer. */
class Call implements Dispatcher.DispatchHandler {
  readonly #request: UpstreamRequest;
  readonly #resolve: (answer: UpstreamAnswer) => void;
  readonly #reject: (error: KvError) => void;
  readonly #queue = new BodyQueue();
  isKept = false;
  #controller: Dispatcher.DispatchController | undefined = undefined;
  #stage: BrokenStage = "connect";
  #ended = false;
  #stopListening: (() => void) | undefined = undefined;

  constructor(
    request: UpstreamRequest,
    resolve: (answer: UpstreamAnswer) => void,
    reject: (error: KvError) => void,
  ) {
    this.#request = request;
    this.#resolve = resolve;
    this.#reject = reject;
  }

  listenForAbort(): void {
    this.#stopListening = this.#request.abort.onAbort(() => this.abort());
  }

  abort(): void {
    this.#stop();
    // A request that still waits for a connection fails at once. When it gets the connection later,
    // it stops there.
    if (this.#stage === "connect") this.#fail(new Error("aborted by the proxy"));
  }

  onRequestStart(controller: Dispatcher.DispatchController): void {
    this.#controller = controller;
    if (this.#ended) {
      this.#stop();
      return;
    }
    this.#stage = "answer";
    this.#request.onSent?.();
  }

  onResponseStart(
    _controller: Dispatcher.DispatchController,
    status: number,
    headers: UpstreamAnswer["headers"],
  ): void {
    if (status < 200) return;
    this.#stage = "body";
    const discard = () => {
      if (!this.#ended) this.#stop();
    };
    this.#resolve({ status, headers, body: this.#queue, discard });
  }

  onResponseData(controller: Dispatcher.DispatchController, chunk: Uint8Array): void {
    this.#queue.push(chunk, controller);
  }

  onResponseEnd(): void {
    if (this.#ended) return;
    this.#finish();
    this.#queue.end();
  }

  onResponseError(_controller: Dispatcher.DispatchController, cause: unknown): void {
    this.#fail(cause);
  }

  #stop(): void {
    this.#controller?.abort(new Error("aborted by the proxy"));
  }

  #fail(cause: unknown): void {
    if (this.#ended) return;
    this.#finish();
    const error = failure(this.#request, this.#stage, cause, this.isKept);
    if (this.#stage === "body") this.#queue.fail(error);
    else this.#reject(error);
  }

  #finish(): void {
    this.#ended = true;
    this.#stopListening?.();
  }
}

type BrokenStage = Exclude<FailureStage, "status">;

const PROBLEMS = {
  connect: "could not be reached",
  answer: "closed the connection before it answered",
  body: "closed the connection in the middle of its answer",
} as const satisfies Record<BrokenStage, string>;

function failure(
  { role, url, path }: UpstreamRequest,
  stage: BrokenStage,
  cause: unknown,
  isKept: boolean,
): KvError {
  const { code, message } = cause as { code?: unknown; message?: unknown };
  const why = typeof code === "string" ? code : String(message);
  return new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `the ${role} instance ${url} ${PROBLEMS[stage]} (${why})`,
    {
      hint: stage === "connect" ? `is it running, and is ${url} right?` : `see the log of ${url}`,
      // A server may close a kept connection just as a request comes.
      details: { role, instance: url, path, stage, keptConnection: isKept && stage === "answer" },
      cause,
    },
  );
}

/** More idle connections than these to one instance are closed. */
const MOST_IDLE = 256;

/** What `ConnectionPool` is made of. */
export interface ConnectionPoolOptions {
  readonly connectMs: number;
  /** Called with the origin of an instance that has closed a kept connection. */
  readonly onClosed?: ((origin: string) => void) | undefined;
}

/**
 * Kept HTTP/1.1 connections, each with one request at a time. A request takes the connection that
 * has been idle longest, so that all those which the last seconds needed stay open. undici's own
 * pool takes the first idle one: the others close after 4 s, and the next burst opens them all at
 * once. It also walks past every busy connection to find an idle one, twice for each request.
 */
export class ConnectionPool {
  readonly #clientOptions: Client.Options;
  readonly #onClosed: ConnectionPoolOptions["onClosed"];
  readonly #clients = new Set<Client>();
  #closed = false;
  readonly #idle = new Map<string, Client[]>();

  constructor({ connectMs, onClosed }: ConnectionPoolOptions) {
    this.#clientOptions = {
      connect: buildConnector({ timeout: connectMs }),
      headersTimeout: 0,
      bodyTimeout: 0,
      maxHeaderSize: 64 * 1024,
    };
    this.#onClosed = onClosed;
  }

  /**
   * Sends a request to `origin`, on a new connection if all others are busy. Returns whether the
   * connection was kept.
   */
  dispatch(
    origin: string,
    request: Dispatcher.DispatchOptions,
    handler: Dispatcher.DispatchHandler,
  ): boolean {
    const kept = this.#idle.get(origin)?.shift();
    const client = kept ?? this.#open(origin);
    client.dispatch(request, handler);
    // A request that undici refuses has failed already, and no "drain" follows.
    if (client.stats.size === 0) this.#release(origin, client);
    return kept !== undefined;
  }

  /** Closes all connections. Their requests fail, and so do later ones. */
  async close(): Promise<void> {
    this.#closed = true;
    await Promise.all([...this.#clients].map((client) => client.destroy()));
  }

  #open(origin: string): Client {
    const client = new Client(origin, this.#clientOptions);
    this.#clients.add(client);
    if (this.#closed) void client.destroy();
    client.on("drain", () => this.#release(origin, client));
    client.on("disconnect", (_origin, _targets, { code }) => {
      const idle = this.#idle.get(origin) ?? [];
      const at = idle.indexOf(client);
      if (at !== -1) {
        idle.splice(at, 1);
        this.#clients.delete(client);
        if (idle.length === 0) this.#idle.delete(origin);
      }
      // Connections that this side closes, for instance idle ones, have other codes.
      if (code === "UND_ERR_SOCKET") this.#onClosed?.(origin);
    });
    return client;
  }

  #release(origin: string, client: Client): void {
    const idle = this.#idle.get(origin) ?? [];
    if (client.stats.connected && idle.length < MOST_IDLE) {
      idle.push(client);
      this.#idle.set(origin, idle);
      return;
    }
    if (idle.length === 0) this.#idle.delete(origin);
    this.#clients.delete(client);
    client.close(() => undefined);
  }
}

/** What the headers of a leg are made of. */
export interface LegHeadersOptions {
  readonly clientHeaders: IncomingHttpHeaders;
  /** The names of the client's headers that the instance gets. */
  readonly forwarded: ReadonlySet<string>;
  readonly requestId: string;
  readonly instance?: { readonly dataParallelRank?: number | undefined } | undefined;
  /**
   * `traceparent` of the leg's span. Undefined where none is recorded: the client's passes
   * unchanged.
   */
  readonly traceparent?: string | undefined;
}

/**
 * Headers of a leg: those of the client that are forwarded, the request's id, and `traceparent`
 * over the client's.
 */
export function legHeaders({
  clientHeaders,
  forwarded,
  requestId,
  instance,
  traceparent,
}: LegHeadersOptions): Record<string, string | string[]> {
  const headers: Record<string, string | string[]> = {};
  const named = namedByConnection(clientHeaders.connection);
  for (const name of forwarded) {
    const value = clientHeaders[name];
    if (value !== undefined && !named.has(name)) headers[name] = value;
  }
  headers["content-type"] = "application/json";
  // The proxy reads the answer, so it must not be compressed.
  headers["accept-encoding"] = "identity";
  headers["x-request-id"] = requestId;
  // An instance that is one rank of a data-parallel server overrides the client's choice of a rank.
  if (instance?.dataParallelRank !== undefined)
    headers["x-data-parallel-rank"] = String(instance.dataParallelRank);
  if (traceparent !== undefined) headers["traceparent"] = traceparent;
  return headers;
}

/**
 * Headers of the client's answer: the instance's, and the client's request id, as a leg may have
 * had another.
 */
export function answerHeaders(
  instanceHeaders: AnswerHeaders,
  requestId: string,
): OutgoingHttpHeaders {
  const headers: OutgoingHttpHeaders = {};
  const named = namedByConnection(instanceHeaders.connection);
  for (const name in instanceHeaders) {
    const value = instanceHeaders[name];
    if (value !== undefined && !HOP_BY_HOP.has(name) && !named.has(name)) headers[name] = value;
  }
  headers["x-request-id"] = requestId;
  return headers;
}

/** Names the members of an answer that the proxy has left out, as no instance has them whole. */
export const LEFT_OUT_HEADER = "x-kv-left-out";

/**
 * Headers that hold for any body of an answer. Others may describe the bytes of one: its length,
 * its coding, its digest, or what it has cost.
 */
const OF_ANY_BODY = [
  "content-type",
  "cache-control",
  "retry-after",
  "x-accel-buffering",
  LEFT_OUT_HEADER,
] as const;

/**
 * The headers of an instance's answer that stay when its body is merged with others, or changed.
 */
export function changedBodyHeaders(headers: AnswerHeaders): AnswerHeaders {
  return Object.fromEntries(OF_ANY_BODY.map((name) => [name, headers[name]]));
}

const NONE: ReadonlySet<string> = new Set();

/** The headers that a `Connection` header names as hop-by-hop. */
function namedByConnection(connection: string | string[] | undefined): ReadonlySet<string> {
  if (connection === undefined || connection === "keep-alive" || connection === "close")
    return NONE;
  return new Set(
    String(connection)
      .split(",")
      .map((name) => name.trim().toLowerCase()),
  );
}
