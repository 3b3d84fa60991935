import type { IncomingMessage, ServerResponse } from "node:http";
import { Deadline, forwardedHeaders, requestIdOf, traceparentOf } from "@kv/fleet/front-end";
import {
  type ErrorForm,
  errorEvent,
  errorForClient,
  MemberList,
  type ReceivedBody,
  type RequestSlot,
  type RequestsInFlight,
  sendError,
  statusOf,
} from "@kv/http";
import { type Ambient, KvError, type Span } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import type { ClientRequest } from "../legs/client-request.js";
import { Attempts } from "../legs/tries.js";
import {
  isClients,
  type RequestCounts,
  type RequestHistory,
  RequestRecord,
  statusName,
} from "../telemetry/request-record.js";
import { AbandonedPrefills } from "./abandoned-prefills.js";
import type { ResolvedLimits } from "./resolved-limits.js";

export interface RequestLivesOptions {
  readonly ambient: Ambient;
  readonly counts: RequestCounts;
  readonly history: RequestHistory;
  readonly inFlight: RequestsInFlight;
  readonly limits: Pick<ResolvedLimits, "abandonedPrefillMs" | "clientHeader">;
  readonly settings: Pick<ProxySettings, "timeouts" | "forwardHeaders" | "exposeInstances">;
}

/** OpenAI's clients send the first, Anthropic's the second. */
const CREDENTIALS = ["authorization", "x-api-key"];

export interface ReceivedRequest {
  /** The route as metrics and logs name it. */
  readonly endpoint: string;
  readonly request: IncomingMessage;
  readonly response: ServerResponse;
  /** The client as limits count it. */
  readonly client: string;
  readonly body?: ReceivedBody | undefined;
}

/**
 * Returns a failure that an instance reported in an answer already sent. The caller writes errors
 * thrown before the answer's head.
 */
export type AnswerRequest = (client: ClientRequest) => Promise<KvError | undefined>;

/** What a request holds until its `end`. */
interface Life extends ReceivedRequest {
  readonly deadline: Deadline;
  readonly record: RequestRecord;
  readonly startedAtMs: number;
  readonly leave: () => void;
  requestId?: string | undefined;
  slot?: RequestSlot | undefined;
  span?: Span | undefined;
  running?: ClientRequest | undefined;
  failure?: KvError | undefined;
  /** The client disconnected before its answer began. */
  abandonedEarly?: boolean | undefined;
}

/** The life of each request that instances answer: admission, id, deadline, answer, end. */
export class RequestLives {
  readonly #options: RequestLivesOptions;
  readonly #inFlight = new MemberList<Deadline>();
  readonly #waitingForIdle: (() => void)[] = [];
  #abandoned: AbandonedPrefills | undefined;
  #refusal: KvError | undefined;
  /** Credential headers that are not forwarded, and are logged once. */
  #unforwarded: readonly string[];

  constructor(options: RequestLivesOptions) {
    const { settings } = options;
    this.#options = options;
    const { prefill } = forwardedHeaders(settings.forwardHeaders);
    this.#unforwarded = CREDENTIALS.filter((name) => !prefill.has(name));
  }

  /** @throws `KV_PROXY_OVERLOADED` (429) for a client that has abandoned too much work. */
  check(client: string): void {
    this.#abandoned?.check(client);
  }

  /** Answers one request. Never rejects; resolves when the answer has left. */
  async serve(received: ReceivedRequest, answer: AnswerRequest): Promise<void> {
    const life = this.#begin(received);
    const closed = whenClosed(life.response, life.deadline);
    try {
      life.failure = await answer(this.#admitted(life));
    } catch (thrown) {
      this.#fail(life, KvError.from(thrown, "KV_INTERNAL", "the proxy failed"));
    }
    await this.#lastByte(life, closed);
    this.#end(life);
  }

  refuse(reason: KvError): void {
    this.#refusal = reason;
  }

  idle(): Promise<void> {
    if (this.#inFlight.size === 0) return Promise.resolve();
    return new Promise((resolve) => this.#waitingForIdle.push(resolve));
  }

  abortAll(reason: KvError): void {
    for (const deadline of this.#inFlight.values()) deadline.abort(reason);
  }

  #begin(received: ReceivedRequest): Life {
    const { ambient, counts, settings } = this.#options;
    const { clock } = ambient;
    const deadline = new Deadline({ clock, requestMs: settings.timeouts.requestMs });
    const member = this.#inFlight.join(deadline);
    counts.began();
    const leave = () => this.#inFlight.leave(member);
    const record = new RequestRecord();
    return { ...received, deadline, record, startedAtMs: clock.now(), leave };
  }

  /** @throws `KV_PROXY_OVERLOADED`, `KV_REQUEST_INVALID` for its id, the reason of `refuse`. */
  #admitted(life: Life): ClientRequest {
    const { ambient, history, inFlight } = this.#options;
    const { endpoint, request, response, body, deadline, record, startedAtMs } = life;
    const { headers } = request;
    this.#warnOfCredentials(life);
    if (this.#refusal !== undefined) throw this.#refusal;
    const requestId = requestIdOf(headers, ambient.random);
    life.requestId = requestId;
    const slot = inFlight.admit(life.client);
    life.slot = slot;
    history.begin({ requestId, endpoint, startedAtMs, record });
    const span = ambient.tracer?.start("kv_proxy.request", {
      kind: "server",
      parent: traceparentOf(headers),
      attributes: { "kv.request_id": requestId, "url.path": endpoint },
    });
    life.span = span;
    life.running = {
      requestId,
      headers: span === undefined ? headers : { ...headers, traceparent: span.traceparent },
      response,
      deadline,
      record,
      attempts: new Attempts(),
      admission: {
        add(parts, lengthBytes) {
          slot.grow(parts);
          body?.share.add(lengthBytes);
        },
      },
      eventStreamStarted: false,
    };
    return life.running;
  }

  /** Answers with an error, or ends an answer that has begun with it. */
  #fail(life: Life, failure: KvError): void {
    const { endpoint, response, deadline, record, requestId, running } = life;
    life.failure = failure;
    const form: ErrorForm = endpoint.startsWith("/v1/messages") ? "anthropic" : "openai";
    const shown = errorForClient(failure, this.#options.settings.exposeInstances);
    life.abandonedEarly =
      running !== undefined && !response.headersSent && response.req.socket.destroyed;
    if (response.headersSent) {
      const isLate = deadline.aborted && response.writableLength > 0;
      const canTell = running?.eventStreamStarted === true && !isLate;
      const event = running?.lastEvent ?? errorEvent(shown, requestId, form);
      breakOff(response, canTell ? event : undefined);
    } else {
      record.status = statusOf(failure);
      sendError(response, shown, requestId, form);
    }
  }

  /** Until the last byte the request is in flight: its deadline holds, and `close` waits for it. */
  async #lastByte({ deadline, response }: Life, closed: Promise<void>): Promise<void> {
    const { stallMs } = this.#options.settings.timeouts;
    if (!deadline.aborted && !response.closed) {
      deadline.startPhase("waiting for the client to read its answer", stallMs);
      deadline.onAbort(() => response.destroy());
    }
    await closed;
    deadline.close();
  }

  #end(life: Life): void {
    const { deadline, response } = life;
    life.slot?.end();
    life.running?.attempts.end();
    life.leave();
    if (life.abandonedEarly === true) this.#addAbandoned(life);
    if (life.failure === undefined && !response.writableFinished) life.failure = deadline.reason;
    if (this.#inFlight.size === 0) for (const resolve of this.#waitingForIdle.splice(0)) resolve();
    this.#report(life);
  }

  #addAbandoned({ client, record }: Life): void {
    const { ambient, limits, settings } = this.#options;
    this.#abandoned ??= new AbandonedPrefills({
      clock: ambient.clock,
      limitMs: limits.abandonedPrefillMs,
      windowMs: settings.timeouts.abandonedWindowMs,
      clientHeader: limits.clientHeader,
    });
    this.#abandoned.add(client, record.prefillWorkMs);
  }

  #report({ endpoint, requestId, startedAtMs, record, failure, span }: Life): void {
    const { ambient, counts, history } = this.#options;
    const { clock, log, metrics } = ambient;
    const status = record.status ?? 200;
    if (failure === undefined) counts.answered(status);
    else counts.failed(failure);
    const durationMs = clock.now() - startedAtMs;
    const outcome = failure?.code ?? statusName(status);
    span?.set({ "http.response.status_code": status });
    span?.end(failure === undefined || isClients(failure) ? undefined : failure);
    metrics.count("kv_proxy_requests_total", 1, { endpoint, outcome });
    metrics.observe("kv_proxy_request_duration_seconds", durationMs / 1000, { endpoint });
    if (record.prefillMs !== undefined)
      metrics.observe("kv_proxy_prefill_duration_seconds", record.prefillMs / 1000);
    if (record.firstByteMs !== undefined && record.streamed === true)
      metrics.observe("kv_proxy_first_byte_seconds", record.firstByteMs / 1000);
    if (record.parts !== undefined) metrics.count("kv_proxy_parts_total", record.parts);
    history.add({ requestId, endpoint, startedAtMs, durationMs, outcome, record });
    const fields = { requestId, endpoint, ...record.logFields(), durationMs };
    if (failure === undefined) log.info("request-done", fields);
    else if (!isClients(failure))
      log.warn("request-failed", { ...fields, ...loggedFailure(failure) });
    else {
      const event = failure.code === "KV_REQUEST_ABORTED" ? "request-aborted" : "request-refused";
      log.info(event, { ...fields, ...loggedFailure(failure) });
    }
    const { limit } = failure?.details ?? {};
    if (typeof limit === "string") metrics.count("kv_proxy_refused_total", 1, { limit });
  }

  #warnOfCredentials({ request }: Life): void {
    const header = this.#unforwarded.find((name) => request.headers[name] !== undefined);
    if (header === undefined) return;
    this.#unforwarded = [];
    this.#options.ambient.log.warn("header-not-forwarded", {
      header,
      hint: `instances do not get clients' credentials; forwardHeaders or --forward-header ${header} sends them`,
    });
  }
}

/** Not logged: a message about a client's error may repeat a value of its body. */
function loggedFailure({ code, message, details }: KvError): object {
  return code === "KV_REQUEST_INVALID" ? { code, param: details.param } : { code, message };
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
