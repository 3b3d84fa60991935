import type { IncomingHttpHeaders, ServerResponse } from "node:http";
import { type Ambient, KvError } from "@kv/interface";
import { ClientRequest } from "../flow/client-request.js";
import type { GenerationFlow } from "../flow/generation-flow.js";
import { Deadline } from "../request/deadline.js";
import { type Endpoint, parseGenerationRequest } from "../request/generation-request.js";
import type { RequestCounts } from "../telemetry/request-counts.js";
import type { RequestHistory } from "../telemetry/request-history.js";
import { RequestRecord } from "../telemetry/request-record.js";
import { type LegSpan, NO_SPAN, type Tracing } from "../telemetry/tracing.js";
import { errorEvent, sendError, statusOf } from "./error-response.js";
import { requestIdOf } from "./headers.js";

export interface GenerationRouteOptions {
  readonly ambient: Ambient;
  readonly flow: GenerationFlow;
  readonly counts: RequestCounts;
  readonly history: RequestHistory;
  readonly tracing: Tracing;
  /** Time limit of a request, in milliseconds. */
  readonly requestMs: number;
}

/** The life of clients' requests for generated text: id, deadline, answer, and at the end metrics, history, span and log. */
export class GenerationRoute {
  readonly #options: GenerationRouteOptions;
  /** The deadlines of the requests in flight. */
  readonly #inFlight = new Set<Deadline>();
  readonly #waitingForIdle: (() => void)[] = [];
  #refusal: KvError | undefined = undefined;

  constructor(options: GenerationRouteOptions) {
    this.#options = options;
  }

  /** Answers one request, and resolves when its answer has left; never rejects. */
  async serve(
    endpoint: Endpoint,
    headers: IncomingHttpHeaders,
    body: Uint8Array,
    response: ServerResponse,
  ): Promise<void> {
    const { ambient, flow, counts, tracing, requestMs } = this.#options;
    const { clock, random } = ambient;
    const startedAtMs = clock.now();
    const deadline = new Deadline({ clock, requestMs });
    const closed = whenClosed(response, deadline);
    const record = new RequestRecord();
    let requestId: string | undefined;
    let client: ClientRequest | undefined;
    let failure: KvError | undefined;
    let span: LegSpan | undefined;
    this.#inFlight.add(deadline);
    counts.began();
    try {
      if (this.#refusal !== undefined) throw this.#refusal;
      requestId = requestIdOf(headers, random);
      const request = parseGenerationRequest(endpoint, body);
      span = tracing.request(headers, { "kv.request_id": requestId, "url.path": endpoint });
      const legHeaders = span === NO_SPAN ? headers : { ...headers, ...span.headers };
      client = new ClientRequest(requestId, request, legHeaders, response, deadline, record);
      failure = await flow.run(client);
    } catch (thrown) {
      failure = KvError.from(thrown, "KV_INTERNAL", "the proxy failed");
      if (response.headersSent) {
        breakOff(response, client?.eventStreamStarted ? errorEvent(failure, requestId) : undefined);
      } else {
        record.status = statusOf(failure);
        sendError(response, failure, requestId);
      }
    }
    deadline.endPhase();
    // The request is in flight until its last byte has left: its deadline still holds, and `close` waits for it.
    if (!deadline.aborted) deadline.onAbort(() => response.destroy());
    await closed;
    deadline.close();
    if (failure === undefined && !response.writableFinished) failure = deadline.reason;
    this.#inFlight.delete(deadline);
    if (this.#inFlight.size === 0) for (const resolve of this.#waitingForIdle.splice(0)) resolve();
    this.#report({ endpoint, requestId, startedAtMs, record, failure, span });
  }

  /** Answers all further requests with `reason`. */
  refuse(reason: KvError): void {
    this.#refusal = reason;
  }

  /** Resolves when no request is in flight. */
  idle(): Promise<void> {
    if (this.#inFlight.size === 0) return Promise.resolve();
    return new Promise((resolve) => this.#waitingForIdle.push(resolve));
  }

  /** Aborts all requests in flight. */
  abortAll(reason: KvError): void {
    for (const deadline of this.#inFlight) deadline.abort(reason);
  }

  /** Counts, records and logs a request that has ended. */
  #report({
    endpoint,
    requestId,
    startedAtMs,
    record,
    failure,
    span,
  }: {
    endpoint: Endpoint;
    requestId: string | undefined;
    startedAtMs: number;
    record: RequestRecord;
    failure: KvError | undefined;
    span: LegSpan | undefined;
  }): void {
    const { ambient, counts, history } = this.#options;
    const { clock, log, metrics } = ambient;
    const status = record.status ?? 200;
    if (failure === undefined) counts.answered(status);
    else counts.failed(failure.code);
    const durationMs = clock.now() - startedAtMs;
    const outcome = failure?.code ?? String(status);
    span?.set({ "http.response.status_code": status });
    span?.end(failure);
    metrics.count("kv_proxy_requests_total", 1, { endpoint, outcome });
    metrics.observe("kv_proxy_request_ms", durationMs, { endpoint });
    if (record.prefillMs !== undefined) metrics.observe("kv_proxy_prefill_ms", record.prefillMs);
    if (record.firstByteMs !== undefined) metrics.observe("kv_proxy_first_byte_ms", record.firstByteMs);
    if (record.parts !== undefined) metrics.count("kv_proxy_parts_total", record.parts);
    history.add({ requestId, endpoint, startedAtMs, durationMs, outcome, record });
    const fields = { requestId, endpoint, ...record.logFields(), durationMs };
    if (failure === undefined) log.info("request-done", fields);
    else log.warn("request-failed", { ...fields, code: failure.code, message: failure.message });
  }
}

/**
 * Ends an answer that is incomplete by closing the connection, so that it does not look complete. `lastEvent` is sent first where the client has read
 * all that came before.
 */
function breakOff(response: ServerResponse, lastEvent: string | undefined): void {
  if (lastEvent === undefined || response.destroyed || response.writableLength > 0) response.destroy();
  else response.write(lastEvent, () => response.destroy());
}

const nothing = () => {};

/** Resolves when the response has ended, sent or not. A client that disconnects before aborts the request. */
function whenClosed(response: ServerResponse, deadline: Deadline): Promise<void> {
  // A disconnected client is also an error of the socket. The event `close` is enough.
  response.on("error", nothing);
  const { socket } = response.req;
  return new Promise((resolve) => {
    const end = () => {
      socket.off("close", end);
      if (!response.writableFinished) deadline.abort(clientDisconnected());
      resolve();
    };
    if (response.destroyed || socket.destroyed) {
      end();
      return;
    }
    response.on("close", end);
    if (response.socket !== null) return;
    // The client pipelines: this response waits behind another one of its connection, and emits no `close` until its turn.
    socket.setMaxListeners(0);
    socket.on("close", end);
  });
}

function clientDisconnected(): KvError {
  return new KvError("KV_REQUEST_ABORTED", "the client disconnected before its answer was complete");
}
