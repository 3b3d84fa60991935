import type { IncomingHttpHeaders, ServerResponse } from "node:http";
import { type Ambient, KvError } from "@kv/interface";
import { createDeadline, type Deadline } from "./deadline.js";
import type { Endpoint } from "./endpoint.js";
import { sendError, statusOf } from "./error-answer.js";
import { errorEvent } from "./event-stream.js";
import type { Trail } from "./exchange.js";
import type { GenerationFlow } from "./generation-flow.js";
import { requestIdOf } from "./headers.js";
import type { RecentRequests } from "./recent.js";
import { readRequest } from "./request-body.js";
import { type LegSpan, NO_SPAN, type Tracing } from "./tracing.js";
import type { Traffic } from "./traffic.js";

export interface GenerationRouteOptions {
  readonly ambient: Ambient;
  readonly flow: GenerationFlow;
  readonly traffic: Traffic;
  readonly requestMs: number;
  readonly recent: RecentRequests;
  readonly tracing: Tracing;
}

export interface GenerationRoute {
  /** Answers one request; never rejects. */
  serve(
    endpoint: Endpoint,
    headers: IncomingHttpHeaders,
    body: Uint8Array,
    response: ServerResponse,
  ): Promise<void>;
  /** Answers every further request with `reason`. */
  refuse(reason: KvError): void;
  /** Resolves when no request is in flight. */
  idle(): Promise<void>;
  /** Gives up all requests in flight. */
  abortAll(reason: KvError): void;
}

/** A request's life: its id, its deadline, its flow, and its end told to client, counts and log. */
export function createGenerationRoute(options: GenerationRouteOptions): GenerationRoute {
  const { flow, traffic, requestMs, recent, tracing } = options;
  const { clock, random, log, metrics } = options.ambient;
  const open = new Set<Deadline>();
  const waiting: (() => void)[] = [];
  let refusal: KvError | undefined;

  async function serve(
    endpoint: Endpoint,
    headers: IncomingHttpHeaders,
    body: Uint8Array,
    response: ServerResponse,
  ): Promise<void> {
    const startedAtMs = clock.now();
    const deadline = createDeadline({ clock, requestMs });
    const closed = whenClosed(response, deadline);
    const trail: Trail = {};
    let requestId: string | undefined;
    let failure: KvError | undefined;
    let span: LegSpan | undefined;
    open.add(deadline);
    traffic.begin();
    try {
      if (refusal !== undefined) throw refusal;
      requestId = requestIdOf(headers, random.uuid);
      const request = readRequest(endpoint, body);
      span = tracing.request(headers, { "kv.request_id": requestId, "url.path": endpoint });
      const traced = span === NO_SPAN ? headers : { ...headers, ...span.headers };
      await flow.run({ requestId, request, headers: traced, response, deadline, trail });
      failure = trail.failure;
    } catch (thrown) {
      failure = KvError.from(thrown, "KV_INTERNAL", "the proxy failed");
      if (response.headersSent) {
        breakOff(response, trail.eventStream === true ? errorEvent(failure, requestId) : undefined);
      } else {
        trail.status = statusOf(failure);
        sendError(response, failure, requestId);
      }
    }
    deadline.pause();
    // Until the last byte has gone, the request is in flight: its deadline holds, and `close` waits for it.
    if (!deadline.ended) deadline.onEnd(() => response.destroy());
    await closed;
    deadline.close();
    if (failure === undefined && !response.writableFinished) failure = deadline.reason;
    open.delete(deadline);
    if (failure === undefined) traffic.answered(trail.status ?? 200);
    else traffic.failed(failure.code);
    if (open.size === 0) for (const resolve of waiting.splice(0)) resolve();
    const durationMs = clock.now() - startedAtMs;
    const outcome = failure?.code ?? String(trail.status ?? 200);
    span?.set({ "http.response.status_code": trail.status ?? 200 });
    span?.end(failure);
    metrics.count("kv_proxy_requests_total", 1, { endpoint, outcome });
    metrics.observe("kv_proxy_request_ms", durationMs, { endpoint });
    if (trail.prefillMs !== undefined) metrics.observe("kv_proxy_prefill_ms", trail.prefillMs);
    if (trail.firstByteMs !== undefined) metrics.observe("kv_proxy_first_byte_ms", trail.firstByteMs);
    if (trail.parts !== undefined) metrics.count("kv_proxy_parts_total", trail.parts);
    const endedAtEpochMs = Date.now();
    recent.add({ requestId, endpoint, startedAtMs, endedAtEpochMs, durationMs, outcome, trail });
    const { prefillStartedAtMs: _, decodeStartedAtMs: __, eventStream: ___, failure: ____, ...shown } = trail;
    const fields = { requestId, endpoint, ...shown, durationMs };
    if (failure === undefined) log.info("request-done", fields);
    else log.warn("request-failed", { ...fields, code: failure.code, message: failure.message });
  }

  return {
    serve,
    refuse(reason) {
      refusal = reason;
    },
    abortAll(reason) {
      for (const deadline of open) deadline.abort(reason);
    },
    idle: () => (open.size === 0 ? Promise.resolve() : new Promise((resolve) => waiting.push(resolve))),
  };
}

/** An answer that breaks off must not look complete, so the connection ends too. What cannot leave at once is not waited for. */
function breakOff(response: ServerResponse, lastWords: string | undefined): void {
  if (lastWords === undefined || response.destroyed || response.writableLength > 0) response.destroy();
  else response.write(lastWords, () => response.destroy());
}

const nothing = () => {};

/** Resolves when the response is over, sent or not; a client that goes away before strikes the deadline. */
function whenClosed(response: ServerResponse, deadline: Deadline): Promise<void> {
  // A client that is gone shows as an error of the socket too; `close` says all there is to know.
  response.on("error", nothing);
  const { socket } = response.req;
  return new Promise((resolve) => {
    const end = () => {
      socket.off("close", end);
      if (!response.writableFinished) deadline.abort(clientGone());
      resolve();
    };
    if (response.destroyed || socket.destroyed) {
      end();
      return;
    }
    response.on("close", end);
    if (response.socket !== null) return;
    // It waits behind another answer of its connection (a client that pipelines), and until its turn it hears of no close.
    socket.setMaxListeners(0);
    socket.on("close", end);
  });
}

function clientGone(): KvError {
  return new KvError("KV_REQUEST_ABORTED", "the client went away before its answer was complete");
}
