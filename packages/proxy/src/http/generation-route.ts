import type { IncomingHttpHeaders, ServerResponse } from "node:http";
import {
  bodyLength,
  changedBodyHeaders,
  Deadline,
  type Endpoint,
  forwardedHeaders,
  parseRequestInSteps,
  requestIdOf,
  traceparentOf,
} from "@kv/fleet/front-end";
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
  withoutAddresses,
} from "@kv/http";
import { type Ambient, KvError, type Span } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import type { DisaggregationStrategy } from "../flow/disaggregation-strategy.js";
import { runParts } from "../flow/fan-out.js";
import type { ClientRequest } from "../legs/client-request.js";
import type { Legs } from "../legs/legs.js";
import { type RequestPart, splitRequest } from "../request/leg-bodies.js";
import { type LegAnswer, streamResponse } from "../response/leg-answer.js";
import { mergeAnswers } from "../response/merge-answers.js";
import type { NamedPrefillers } from "../sidecar/named-prefillers.js";
import { isClients, type RequestCounts } from "../telemetry/request-counts.js";
import type { RequestHistory } from "../telemetry/request-history.js";
import { RequestRecord } from "../telemetry/request-record.js";
import { AbandonedPrefills } from "./abandoned-prefills.js";
import type { ResolvedLimits } from "./limits/resolved-limits.js";

export interface GenerationRouteOptions {
  readonly ambient: Ambient;
  readonly legs: Legs;
  readonly strategy: DisaggregationStrategy;
  readonly counts: RequestCounts;
  readonly history: RequestHistory;
  readonly inFlight: RequestsInFlight;
  readonly limits: Pick<ResolvedLimits, "abandonedPrefillMs" | "clientHeader">;
  readonly settings: Pick<ProxySettings, "timeouts" | "forwardHeaders" | "exposeInstances">;
  /** Of a sidecar: reads the prefill instances of a request from its headers. */
  readonly namedPrefillers: NamedPrefillers | undefined;
}

/** OpenAI's clients send the first, Anthropic's the second. */
const CREDENTIALS = ["authorization", "x-api-key"];

/** A request for generated text whose body has arrived. */
export interface ReceivedRequest {
  readonly endpoint: Endpoint;
  readonly headers: IncomingHttpHeaders;
  readonly body: ReceivedBody;
  readonly response: ServerResponse;
  /** The client, as limits per client count it. */
  readonly client: string;
}

/**
 * The life of clients' requests for generated text: id, deadline, answer, and at the end metrics,
 * history, span and log.
 */
export class GenerationRoute {
  readonly #options: GenerationRouteOptions;
  /** The deadlines of the requests in flight. */
  readonly #inFlight = new MemberList<Deadline>();
  readonly #waitingForIdle: (() => void)[] = [];
  #refusal: KvError | undefined = undefined;
  #abandoned: AbandonedPrefills | undefined = undefined;
  /**
   * Headers with credentials that are not forwarded: the first one that a client sends is logged.
   */
  #unforwarded: readonly string[];

  constructor(options: GenerationRouteOptions) {
    this.#options = options;
    const { prefill } = forwardedHeaders(options.settings.forwardHeaders);
    this.#unforwarded = CREDENTIALS.filter((name) => !prefill.has(name));
  }

  /**
   * Called before the body is read.
   * @throws `KV_PROXY_OVERLOADED` (429) for a client that has abandoned too much work.
   */
  check(client: string): void {
    this.#abandoned?.check(client);
  }

  /** Answers one request, and resolves when its answer has left; never rejects. */
  async serve({ endpoint, headers, body, response, client: name }: ReceivedRequest): Promise<void> {
    const { ambient, counts, history, settings, inFlight, limits, namedPrefillers } = this.#options;
    const { clock, random, tracer } = ambient;
    const { requestMs, stallMs } = settings.timeouts;
    for (const name of this.#unforwarded) {
      if (headers[name] === undefined) continue;
      this.#warnOfCredentials(name);
      break;
    }
    const form: ErrorForm = endpoint === "/v1/messages" ? "anthropic" : "openai";
    const startedAtMs = clock.now();
    const deadline = new Deadline({ clock, requestMs });
    const closed = whenClosed(response, deadline);
    const record = new RequestRecord();
    let requestId: string | undefined;
    let client: ClientRequest | undefined;
    let failure: KvError | undefined;
    let span: Span | undefined;
    let slot: RequestSlot | undefined;
    let abandonedEarly = false;
    const admission = {
      add(parts: number, lengthBytes: number) {
        slot?.grow(parts);
        body.share.add(lengthBytes);
      },
    };
    const member = this.#inFlight.join(deadline);
    counts.began();
    try {
      if (this.#refusal !== undefined) throw this.#refusal;
      requestId = requestIdOf(headers, random);
      slot = inFlight.admit(name);
      history.begin({ requestId, endpoint, startedAtMs, record });
      const prefillers = namedPrefillers?.of(headers, requestId);
      const request = await parseRequestInSteps(
        endpoint,
        body.take(),
        this.#options.legs.fleet.parses,
      );
      span = tracer?.start("kv_proxy.request", {
        kind: "server",
        parent: traceparentOf(headers),
        attributes: { "kv.request_id": requestId, "url.path": endpoint },
      });
      const legHeaders =
        span === undefined ? headers : { ...headers, traceparent: span.traceparent };
      client = {
        requestId,
        request,
        headers: legHeaders,
        response,
        deadline,
        record,
        admission,
        prefillers,
        attempts: this.#options.legs.newAttempts(request),
        preferredDecode: undefined,
        eventStreamStarted: false,
      };
      failure = await this.#run(client);
    } catch (thrown) {
      failure = KvError.from(thrown, "KV_INTERNAL", "the proxy failed");
      const shown = errorForClient(failure, settings.exposeInstances);
      abandonedEarly =
        client !== undefined && !response.headersSent && response.req.socket.destroyed;
      if (response.headersSent) {
        const isLate = deadline.aborted && response.writableLength > 0;
        const canTell = client?.eventStreamStarted === true && !isLate;
        breakOff(response, canTell ? errorEvent(shown, requestId, form) : undefined);
      } else {
        record.status = statusOf(failure);
        sendError(response, shown, requestId, form);
      }
    }
    // The request is in flight until its last byte has left: its deadline still holds, and `close`
    // waits for it.
    if (!deadline.aborted && !response.closed) {
      deadline.startPhase("waiting for the client to read its answer", stallMs);
      deadline.onAbort(() => response.destroy());
    }
    await closed;
    deadline.close();
    slot?.end();
    if (abandonedEarly) {
      this.#abandoned ??= new AbandonedPrefills({
        clock,
        limitMs: limits.abandonedPrefillMs,
        windowMs: settings.timeouts.abandonedWindowMs,
        clientHeader: limits.clientHeader,
      });
      this.#abandoned.add(name, record.prefillWorkMs);
    }
    if (failure === undefined && !response.writableFinished) failure = deadline.reason;
    this.#inFlight.leave(member);
    if (this.#inFlight.size === 0) for (const resolve of this.#waitingForIdle.splice(0)) resolve();
    this.#report({ endpoint, requestId, startedAtMs, record, failure, span });
  }

  /**
   * Answers the request. Returns the failure that an instance reported in an answer which the
   * client has received. An error before the answer's head has left is the caller's to write.
   */
  async #run(client: ClientRequest): Promise<KvError | undefined> {
    const { legs, strategy } = this.#options;
    const { fleet, settings, prefillers, decoders } = legs;
    const { request } = client;
    if (prefillers.readsTokenIds() || decoders.readsTokenIds())
      await fleet.addTokenIds(request, client.headers);
    if (client.prefillers?.length === 0)
      return this.#stream(client, await legs.single(client, "unnamed"));
    if (request.disaggregationLimit !== undefined) {
      if (settings.policy.unsplittable === "fail")
        throw cannotDisaggregate(request.disaggregationLimit);
      return this.#stream(
        client,
        await legs.single(client, "unsplittable", request.disaggregationLimit),
      );
    }
    if (request.promptFields === "prompt-only")
      return this.#stream(client, await legs.single(client, "prompt-only"));
    const split = splitRequest(request, settings.limits.parts);
    const begun = split.next();
    const parts = begun.done === true ? begun.value : await fleet.parses.run(split);
    const [part] = parts;
    if (parts.length > 1 || part === undefined) {
      const lengthBytes = parts.reduce((sum, { request }) => sum + bodyLength(request), 0);
      client.admission?.add(parts.length - 1, lengthBytes);
      return this.#runParts(client, parts);
    }
    const answer = await strategy.run(client);
    if (answer.promptAnswer === undefined) return this.#stream(client, answer);
    const { requestId, deadline } = client;
    await mergeAnswers(legs, client, [{ ...part, requestId, deadline, answer }]);
    return undefined;
  }

  async #runParts(
    client: ClientRequest,
    parts: readonly RequestPart[],
  ): Promise<KvError | undefined> {
    client.record.parts = parts.length;
    const answered = await runParts(client, this.#options.strategy, parts);
    try {
      const refusal = answered.find(({ answer }) => answer.status !== 200);
      if (refusal !== undefined) return await this.#stream(client, refusal.answer);
      await mergeAnswers(this.#options.legs, client, answered);
      return undefined;
    } finally {
      for (const { answer, deadline } of answered) {
        answer.discard();
        answer.visit.abandoned();
        deadline.close();
      }
    }
  }

  #stream(client: ClientRequest, answer: LegAnswer): Promise<KvError | undefined> {
    const { timeouts, exposeInstances } = this.#options.legs.settings;
    return streamResponse(
      client,
      exposeInstances ? answer : hideAddresses(answer),
      timeouts.stallMs,
    );
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
    for (const deadline of this.#inFlight.values()) deadline.abort(reason);
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
    span: Span | undefined;
  }): void {
    const { ambient, counts, history } = this.#options;
    const { clock, log, metrics } = ambient;
    const status = record.status ?? 200;
    if (failure === undefined) counts.answered(status);
    else counts.failed(failure);
    const durationMs = clock.now() - startedAtMs;
    const outcome = failure?.code ?? String(status);
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

  #warnOfCredentials(header: string): void {
    this.#unforwarded = [];
    this.#options.ambient.log.warn("header-not-forwarded", {
      header,
      hint: `instances do not get clients' credentials; forwardHeaders or --forward-header ${header} sends them`,
    });
  }
}

/**
 * A server failure of an instance without addresses in its text. Other answers stay as they are: an
 * error of the client may repeat its own URL.
 */
function hideAddresses(answer: LegAnswer): LegAnswer {
  if (answer.status < 500 || answer.rest !== undefined) return answer;
  const given = answer.held.toString();
  const held = withoutAddresses(given);
  if (held === given) return answer;
  return { ...answer, headers: changedBodyHeaders(answer.headers), held: Buffer.from(held) };
}

function cannotDisaggregate(why: string): KvError {
  const message = `prefill and decode of this request cannot run on two instances: ${why}`;
  return new KvError("KV_REQUEST_INVALID", message, {
    hint: "change the request; or run the proxy with --unsplittable decode-computes, which sends such requests to one decode instance",
  });
}

/**
 * The message of an error that the client has caused may repeat a value of its body, so it is not
 * logged.
 */
function loggedFailure({ code, message, details }: KvError): object {
  return code === "KV_REQUEST_INVALID" ? { code, param: details.param } : { code, message };
}

/**
 * Ends an answer that is incomplete by closing the connection, so that it does not look complete.
 * `lastEvent` is sent first, after all that was written.
 */
function breakOff(response: ServerResponse, lastEvent: string | undefined): void {
  if (lastEvent === undefined || response.destroyed) response.destroy();
  else response.write(lastEvent, () => response.destroy());
}

/**
 * Resolves when the response has ended, sent or not. A client that disconnects before aborts the
 * request.
 */
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
