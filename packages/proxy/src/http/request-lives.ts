import type { IncomingHttpHeaders, ServerResponse } from "node:http";
import { Deadline, type Fleet, reportEnd, requestIdOf, traceparentOf } from "@kv/fleet/front-end";
import {
  type ErrorForm,
  errorEvent,
  errorForClient,
  MemberList,
  type ReceivedBody,
  type RequestSlot,
  RequestsInFlight,
  sendError,
  statusOf,
  type Turn,
} from "@kv/http";
import { KvError, type Span } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import type { ClientRequest } from "../legs/client-request.js";
import { Attempts } from "../legs/tries.js";
import { RequestCounts, RequestHistory, RequestRecord } from "../telemetry/request-record.js";
import { AbandonedPrefills } from "./abandoned-prefills.js";
import type { ResolvedLimits } from "./resolved-limits.js";

/** OpenAI's clients send the first, Anthropic's the second. */
const CREDENTIALS = ["authorization", "x-api-key"];

/**
 * Returns a failure that an instance reported in an answer already sent. The caller writes errors
 * thrown before the answer's head.
 */
export type AnswerRequest = (client: ClientRequest) => Promise<KvError | undefined>;

/** What a request holds until its `end`. */
interface Life extends ClientRequest {
  requestId: string;
  headers: IncomingHttpHeaders;
  slot?: RequestSlot | undefined;
  span?: Span | undefined;
  failure?: KvError | undefined;
}

/** The life of each request that instances answer: admission, id, deadline, answer, end. */
export class RequestLives {
  readonly counts = new RequestCounts();
  readonly history: RequestHistory;
  readonly #deadlines = new MemberList<Deadline>();
  readonly #inFlight: RequestsInFlight;
  /** Undefined until a client has abandoned a prefill leg. */
  #abandoned: AbandonedPrefills | undefined;
  readonly #waitingForIdle: (() => void)[] = [];
  #refusal: KvError | undefined;
  /** Credential headers that are not forwarded, and are logged once. */
  #unforwarded: readonly string[];

  constructor(
    private readonly fleet: Fleet,
    private readonly settings: ProxySettings,
    private readonly limits: ResolvedLimits,
  ) {
    this.history = new RequestHistory(fleet.ambient.clock);
    this.#inFlight = new RequestsInFlight(limits);
    this.#unforwarded = CREDENTIALS.filter((name) => !fleet.forwarded.prefill.has(name));
  }

  /** @throws `KV_PROXY_OVERLOADED` (429) for a client that has abandoned too much work. */
  check(client: string): void {
    this.#abandoned?.check(client);
  }

  /** Answers one request. Never rejects; resolves when the answer has left. */
  async serve(
    { request, response, client }: Turn,
    endpoint: string,
    answer: AnswerRequest,
    body?: ReceivedBody,
  ): Promise<void> {
    const { clock } = this.fleet.ambient;
    const { requestMs } = this.settings.timeouts;
    const life: Life = {
      requestId: "",
      headers: request.headers,
      response,
      deadline: new Deadline({ clock, requestMs }),
      record: new RequestRecord(endpoint, clock.now()),
      attempts: new Attempts(),
      eventStreamStarted: false,
      grow(parts, lengthBytes) {
        this.slot?.grow(parts);
        body?.share.add(lengthBytes);
      },
    };
    const { deadline, record } = life;
    const member = this.#deadlines.join(deadline);
    this.counts.began();
    const closed = whenClosed(response, deadline);
    let abandonedEarly = false;
    try {
      this.#admit(life, client);
      life.failure = await answer(life);
    } catch (thrown) {
      abandonedEarly = !response.headersSent && request.socket.destroyed;
      this.#fail(life, KvError.from(thrown, "KV_INTERNAL", "the proxy failed"));
    }
    await this.#lastByte(life, closed);

    life.slot?.end();
    life.attempts.end();
    this.#deadlines.leave(member);
    if (abandonedEarly) this.#addAbandoned(client, record.prefillWorkMs);
    if (life.failure === undefined && !response.writableFinished) life.failure = deadline.reason;
    if (this.#deadlines.size === 0) for (const resolve of this.#waitingForIdle.splice(0)) resolve();
    this.#report(life);
  }

  refuse(reason: KvError): void {
    this.#refusal = reason;
  }

  idle(): Promise<void> {
    if (this.#deadlines.size === 0) return Promise.resolve();
    return new Promise((resolve) => this.#waitingForIdle.push(resolve));
  }

  abortAll(reason: KvError): void {
    for (const deadline of this.#deadlines.values()) deadline.abort(reason);
  }

  /** @throws `KV_PROXY_OVERLOADED`, `KV_REQUEST_INVALID` for its id, the reason of `refuse`. */
  #admit(life: Life, client: string): void {
    const { random, tracer } = this.fleet.ambient;
    const { headers, record } = life;
    this.#warnOfCredentials(headers);
    if (this.#refusal !== undefined) throw this.#refusal;
    record.requestId = life.requestId = requestIdOf(headers, random);
    life.slot = this.#inFlight.admit(client);
    this.history.begin(record);
    life.span = tracer?.start("kv_proxy.request", {
      kind: "server",
      parent: traceparentOf(headers),
      attributes: { "kv.request_id": life.requestId, "url.path": record.endpoint },
    });
    if (life.span !== undefined) life.headers = { ...headers, traceparent: life.span.traceparent };
  }

  /** Answers with an error, or ends an answer that has begun with it. */
  #fail(life: Life, failure: KvError): void {
    const { response, deadline, record } = life;
    life.failure = failure;
    const form: ErrorForm = record.endpoint.startsWith("/v1/messages") ? "anthropic" : "openai";
    const shown = errorForClient(failure, this.settings.exposeInstances);
    if (response.headersSent) {
      const isLate = deadline.aborted && response.writableLength > 0;
      const event = life.lastEvent ?? errorEvent(shown, record.requestId, form);
      breakOff(response, life.eventStreamStarted && !isLate ? event : undefined);
    } else {
      record.status = statusOf(failure);
      sendError(response, shown, record.requestId, form);
    }
  }

  /** Until the last byte the request is in flight: its deadline holds, and `close` waits for it. */
  async #lastByte({ deadline, response }: Life, closed: Promise<void>): Promise<void> {
    if (!deadline.aborted && !response.closed) {
      const { stallMs } = this.settings.timeouts;
      deadline.startPhase("waiting for the client to read its answer", stallMs);
      deadline.onAbort(() => response.destroy());
    }
    await closed;
    deadline.close();
  }

  #addAbandoned(client: string, workMs: number): void {
    this.#abandoned ??= new AbandonedPrefills({
      clock: this.fleet.ambient.clock,
      limitMs: this.limits.abandonedPrefillMs,
      clientHeader: this.limits.clientHeader,
    });
    this.#abandoned.add(client, workMs);
  }

  #report({ record, failure, span }: Life): void {
    const { clock, metrics } = this.fleet.ambient;
    const { endpoint, status = 200 } = record;
    this.counts.ended(status, failure);
    const durationMs = clock.now() - record.startedAtMs;
    record.durationMs = durationMs;
    span?.set({ "http.response.status_code": status });
    span?.end(failure !== undefined && statusOf(failure) >= 500 ? failure : undefined);
    if (record.prefillMs !== undefined)
      metrics.observe("kv_proxy_prefill_duration_seconds", record.prefillMs / 1000);
    if (record.firstByteMs !== undefined && record.streamed === true)
      metrics.observe("kv_proxy_first_byte_seconds", record.firstByteMs / 1000);
    if (record.parts !== undefined) metrics.count("kv_proxy_parts_total", record.parts);
    const ended = { endpoint, status, failure, durationMs, fields: record.logFields() };
    record.outcome = reportEnd(this.fleet.ambient, ended);
    this.history.add(record);
  }

  #warnOfCredentials(headers: IncomingHttpHeaders): void {
    const header = this.#unforwarded.find((name) => headers[name] !== undefined);
    if (header === undefined) return;
    this.#unforwarded = [];
    this.fleet.ambient.log.warn("header-not-forwarded", {
      header,
      hint: `instances do not get clients' credentials; forwardHeaders or --forward-header ${header} sends them`,
    });
  }
}

/** Closes the connection after `lastEvent`, so that an incomplete answer does not look whole. */
function breakOff(response: ServerResponse, lastEvent: string | undefined): void {
  if (lastEvent === undefined || response.destroyed) response.destroy();
  else response.write(lastEvent, () => response.destroy());
}

/** Resolves when the response has ended. A client that disconnects earlier aborts the request. */
function whenClosed(response: ServerResponse, deadline: Deadline): Promise<void> {
  const { socket } = response.req;
  return new Promise((resolve) => {
    const end = () => {
      if (!response.writableFinished) deadline.abort(clientDisconnected());
      resolve();
    };
    if (response.destroyed || socket.destroyed) {
      end();
      return;
    }
    response.on("close", end);
  });
}

function clientDisconnected(): KvError {
  return new KvError(
    "KV_REQUEST_ABORTED",
    "the client disconnected before its answer was complete",
  );
}
