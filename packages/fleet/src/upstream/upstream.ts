import type { IncomingHttpHeaders, OutgoingHttpHeaders } from "node:http";
import { Readable } from "node:stream";
import { type Clock, KvError, YieldingQueue } from "@kv/interface";
import { buildConnector, Client, type Dispatcher } from "undici";
import type { FailureStage, Role } from "../instances/instance.js";
import { getOrAdd } from "../instances/pooled-instance.js";
import type { InstanceGet } from "../pairing/engine-facts.js";
import { Deadline } from "../request/deadline.js";
import type { RequestBody } from "../request/generation-request.js";
import { HOP_BY_HOP } from "./forwarded-headers.js";

/** An answer's headers, names in lower case. */
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
  readonly abort: Deadline;
  /** Takes no kept connection. */
  readonly fresh?: boolean | undefined;
  /** Called when the request begins to leave. Before, the instance has received nothing. */
  readonly onSent?: (() => void) | undefined;
}

/** The head of an answer, and its body as it arrives. */
export interface UpstreamAnswer {
  readonly status: number;
  /** Names in lower case. */
  readonly headers: AnswerHeaders;
  /** A body that breaks off fails with `KV_PROXY_UPSTREAM_FAILED` at stage `body`. */
  readonly body: BodyQueue;
  /** Closes the connection, unless the answer has ended. */
  discard(): void;
}

/** Options of `Upstream`. */
export interface UpstreamOptions {
  readonly clock: Clock;
  readonly connectMs: number;
  /** Gets the origin of an instance that closed a kept connection. */
  readonly onClosed?: ((origin: string) => void) | undefined;
}

const MOST_IDLE = 256;

/**
 * An HTTP/1.1 client. It limits only the time to connect; callers use `abort`. Each kept connection
 * has one request at a time. A request takes the one that was idle longest, so that recently needed
 * ones stay open. undici's pool takes the first idle one: the others close after 4 s, the next burst
 * opens them all, and each request walks past every busy one twice.
 */
export class Upstream {
  readonly longBodies: LongBodies;
  readonly #clientOptions: Client.Options;
  readonly #onClosed: UpstreamOptions["onClosed"];
  readonly #targets = new Map<string, { origin: string; prefix: string }>();
  readonly #connections = new Set<Client>();
  readonly #idle = new Map<string, Client[]>();
  #closed = false;

  constructor({ clock, connectMs, onClosed }: UpstreamOptions) {
    this.#clientOptions = {
      connect: buildConnector({ timeout: connectMs }),
      headersTimeout: 0,
      bodyTimeout: 0,
      maxHeaderSize: 64 * 1024,
    };
    this.#onClosed = onClosed;
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
      if (request.abort.aborted) return;
      const { method, path, headers, body, fresh = false } = request;
      const { origin, prefix } = this.#target(request.url);
      const kept = fresh ? undefined : this.#idle.get(origin)?.shift();
      const client = kept ?? this.#open(origin);
      call.isKept = kept !== undefined;
      client.dispatch(
        {
          path: prefix + path,
          method,
          ...(typeof body === "object"
            ? this.longBodies.send(headers, body)
            : { headers, body: body ?? null }),
        },
        call,
      );
      // undici has refused it, and no "drain" follows.
      if (client.stats.size === 0) this.#release(origin, client);
    });
  }

  /** Present and later requests fail. */
  async close(): Promise<void> {
    this.#closed = true;
    await Promise.all([...this.#connections].map((client) => client.destroy()));
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #target(url: string) {
    return getOrAdd(this.#targets, url, () => {
      const { origin, pathname } = new URL(url);
      return { origin, prefix: pathname === "/" ? "" : pathname };
    });
  }

  #open(origin: string): Client {
    const client = new Client(origin, this.#clientOptions);
    this.#connections.add(client);
    if (this.#closed) void client.destroy();
    client.on("drain", () => this.#release(origin, client));
    client.on("disconnect", (_origin, _targets, { code }) => {
      const idle = this.#idle.get(origin) ?? [];
      const at = idle.indexOf(client);
      if (at !== -1) {
        idle.splice(at, 1);
        this.#connections.delete(client);
        if (idle.length === 0) this.#idle.delete(origin);
      }
      // Other codes mean that this side closed the connection.
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
    this.#connections.delete(client);
    client.close(() => undefined);
  }
}

const SENT_AT_ONCE_BYTES = 64 * 1024;
const MOST_READY_PIECES = 4;

/** Sends long bodies in turns with other work. */
class LongBodies {
  readonly #turns: YieldingQueue;

  constructor(clock: Clock) {
    this.#turns = new YieldingQueue({ clock });
  }

  /**
   * Whether more pieces are ready than leave in a few turns. Pieces for an instance that does not
   * read are not ready.
   */
  get isBusy(): boolean {
    return this.#turns.length >= MOST_READY_PIECES;
  }

  /** Sends the pieces one by one, without copies. */
  send<Headers extends object>(headers: Headers, pieces: readonly Uint8Array[]) {
    const length = pieces.reduce((sum, piece) => sum + piece.length, 0);
    const body = Readable.from(this.#inTurns(pieces), { highWaterMark: 1 });
    return { headers: { ...headers, "content-length": String(length) }, body };
  }

  async *#inTurns(pieces: readonly Uint8Array[]): AsyncGenerator<Uint8Array> {
    for (const piece of pieces)
      for (let at = 0; at < piece.length; at += SENT_AT_ONCE_BYTES) {
        if (piece.length > SENT_AT_ONCE_BYTES) await this.#turns.turn();
        yield piece.subarray(at, at + SENT_AT_ONCE_BYTES);
      }
  }
}

/** Cuts a body after `limitBytes`. */
export function instanceGet(upstream: Upstream, clock: Clock, limitBytes = 64 * 1024): InstanceGet {
  return async ({ role, url, path, post, timeoutMs }) => {
    const abort = new Deadline({ clock, requestMs: timeoutMs });
    const [method, headers] =
      post === undefined
        ? (["GET", {}] as const)
        : (["POST", { "content-type": "application/json" }] as const);
    try {
      const answer = await upstream.send({ role, url, method, path, headers, body: post, abort });
      const { bytes } = await answer.body.readLimited(limitBytes);
      answer.discard();
      return { status: answer.status, body: bytes.toString() };
    } finally {
      abort.close();
    }
  };
}

class Call implements Dispatcher.DispatchHandler {
  readonly #queue = new BodyQueue();
  isKept = false;
  #controller: Dispatcher.DispatchController | undefined;
  #stage: BrokenStage = "connect";
  #ended = false;
  #stopListening: (() => void) | undefined;

  constructor(
    private readonly request: UpstreamRequest,
    private readonly resolve: (answer: UpstreamAnswer) => void,
    private readonly reject: (error: KvError) => void,
  ) {
    this.#stopListening = request.abort.onAbort((reason) => {
      this.#stop();
      // It still waits for a connection, and stops when it gets one.
      if (this.#stage === "connect") this.#fail(reason);
    });
  }

  onRequestStart(controller: Dispatcher.DispatchController): void {
    this.#controller = controller;
    if (this.#ended) {
      this.#stop();
      return;
    }
    this.#stage = "answer";
    this.request.onSent?.();
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
    this.resolve({ status, headers, body: this.#queue, discard });
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
    const { reason = new Error("aborted by the proxy") } = this.request.abort;
    this.#controller?.abort(reason);
  }

  #fail(cause: unknown): void {
    if (this.#ended) return;
    this.#finish();
    const error = failure(this.request, this.#stage, cause, this.isKept);
    if (this.#stage === "body") this.#queue.fail(error);
    else this.reject(error);
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

interface Sender {
  pause(): void;
  resume(): void;
}

/** The first bytes of a body. */
export interface LimitedBody {
  readonly bytes: Buffer;
  readonly complete: boolean;
}

type Next = IteratorResult<Uint8Array, undefined>;

const DONE: Next = { done: true, value: undefined };

/**
 * Chunks of an instance's answer for one reader. More than `highBytes` of unread chunks pause the
 * sender.
 */
export class BodyQueue implements AsyncIterator<Uint8Array, undefined> {
  readonly #highBytes: number;
  readonly #chunks: Uint8Array[] = [];
  #unreadBytes = 0;
  #ended = false;
  #failure: Error | undefined;
  #paused: Sender | undefined;
  #reader: { resolve(next: Next): void; reject(error: Error): void } | undefined;

  constructor(highBytes = 256 * 1024) {
    this.#highBytes = highBytes;
  }

  /** Reads an ended body at once; undefined if it has not ended or exceeds `limitBytes`. */
  readBuffered(limitBytes: number): LimitedBody | undefined {
    if (!this.#ended || this.#unreadBytes > limitBytes) return undefined;
    this.#unreadBytes = 0;
    return { bytes: concatChunks(this.#chunks.splice(0)), complete: true };
  }

  /**
   * Reads until the end, above `limitBytes`, or until `enough` is true of a chunk. The rest stays
   * unread. Rejects with the error of `fail`.
   */
  async readLimited(
    limitBytes: number,
    enough?: (chunk: Uint8Array) => boolean,
  ): Promise<LimitedBody> {
    const chunks: Uint8Array[] = [];
    let lengthBytes = 0;
    for (;;) {
      const { done, value } = await this.next();
      if (done === true) return { bytes: concatChunks(chunks), complete: true };
      chunks.push(value);
      lengthBytes += value.byteLength;
      const isEnough = enough?.(value) === true;
      const isAbove = lengthBytes > limitBytes;
      const hasEnded = this.#ended && this.#chunks.length === 0;
      if (hasEnded || isEnough || isAbove)
        return { bytes: concatChunks(chunks), complete: hasEnded && !isAbove };
    }
  }

  /** All unread chunks as one. Rejects with the error of `fail` after the last. */
  next(): Promise<Next> {
    if (this.#chunks.length > 0) {
      const value = concatChunks(this.#chunks.splice(0));
      this.#unreadBytes = 0;
      const sender = this.#paused;
      this.#paused = undefined;
      sender?.resume();
      return Promise.resolve({ done: false, value });
    }
    if (this.#failure !== undefined) return Promise.reject(this.#failure);
    if (this.#ended) return Promise.resolve(DONE);
    return new Promise((resolve, reject) => {
      this.#reader = { resolve, reject };
    });
  }

  push(chunk: Uint8Array, sender: Sender): void {
    const reader = this.#reader;
    if (reader !== undefined) {
      this.#reader = undefined;
      reader.resolve({ done: false, value: chunk });
      return;
    }
    this.#chunks.push(chunk);
    this.#unreadBytes += chunk.byteLength;
    if (this.#unreadBytes > this.#highBytes && this.#paused === undefined) {
      this.#paused = sender;
      sender.pause();
    }
  }

  end(): void {
    this.#ended = true;
    this.#reader?.resolve(DONE);
    this.#reader = undefined;
  }

  fail(error: Error): void {
    this.#failure = error;
    this.#reader?.reject(error);
    this.#reader = undefined;
  }
}

/** A single chunk, as most answers are, is not copied. */
function concatChunks(chunks: readonly Uint8Array[]): Buffer {
  const [first] = chunks;
  return chunks.length === 1 && Buffer.isBuffer(first) ? first : Buffer.concat(chunks);
}

/** What a leg's headers are made of. */
export interface LegHeadersOptions {
  readonly clientHeaders: IncomingHttpHeaders;
  /** Client headers that the instance gets. */
  readonly forwarded: ReadonlySet<string>;
  readonly requestId: string;
  readonly instance?: { readonly dataParallelRank?: number | undefined } | undefined;
  /** Of the leg's span. Without it, the client's passes unchanged. */
  readonly traceparent?: string | undefined;
}

/** The client's forwarded headers, the request's id, and `traceparent`. */
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
  // The proxy reads the answer, so it must be plain.
  headers["accept-encoding"] = "identity";
  headers["x-request-id"] = requestId;
  // Overrides the client's choice of a rank.
  if (instance?.dataParallelRank !== undefined)
    headers["x-data-parallel-rank"] = String(instance.dataParallelRank);
  if (traceparent !== undefined) headers["traceparent"] = traceparent;
  return headers;
}

/** The instance's headers with the client's request id. A leg may have had another. */
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

/** Names members of an answer that no instance has whole, and that were left out. */
export const LEFT_OUT_HEADER = "x-kv-left-out";

/** Others may describe the bytes: length, coding, digest, cost. */
const OF_ANY_BODY = [
  "content-type",
  "cache-control",
  "retry-after",
  "x-accel-buffering",
  LEFT_OUT_HEADER,
] as const;

/** Headers that stay when an answer's body changes. */
export function changedBodyHeaders(headers: AnswerHeaders): AnswerHeaders {
  return Object.fromEntries(OF_ANY_BODY.map((name) => [name, headers[name]]));
}

const NONE: ReadonlySet<string> = new Set();

function namedByConnection(connection: string | string[] | undefined): ReadonlySet<string> {
  if (connection === undefined || connection === "keep-alive" || connection === "close")
    return NONE;
  return new Set(
    String(connection)
      .split(",")
      .map((name) => name.trim().toLowerCase()),
  );
}
