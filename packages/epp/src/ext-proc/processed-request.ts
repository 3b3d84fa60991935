import { once } from "node:events";
import type { ServerDuplexStream } from "@grpc/grpc-js";
import type { FailureStage, Instance, Visit } from "@kv/fleet";
import {
  checkDecodeBody,
  type Endpoint,
  type Fleet,
  type GenerationRequest,
  PREFILLER_HEADER,
  parseRequestInSteps,
  requestIdOf,
  traceparentOf,
} from "@kv/fleet/front-end";
import { type BodyBudget, errorBody, errorForClient, IncomingBody, overloaded } from "@kv/http";
import { KvError, type Span, type Timer } from "@kv/interface";
import type { PickerSettings } from "../config/settings.js";
import { type Choice, type EndpointPicker, endpointOf } from "../pick/endpoint-picker.js";
import {
  bodyResponses,
  endpointLabel,
  grpcError,
  headerMutation,
  headersOf,
  isGeneration,
  MessageOrder,
  metadataTexts,
  neverEnded,
  type ProcessingRequest,
  type ProcessingResponse,
  refusalStatus,
  requireFullDuplex,
  requireServed,
  tooSlow,
  upstreamAddress,
} from "./messages.js";

/** Where the gateway sends the request: `ip:port`, several separated by commas, in order. */
const DESTINATION_HEADER = "x-gateway-destination-endpoint";
/** Headers in which llm-d's sidecar takes the addresses of further instances. */
const PEER_HEADERS = ["x-encoder-hosts-ports", "x-data-parallel-host-port"] as const;
const DESTINATION_NAMESPACE = "envoy.lb";
const SERVED_KEY = "x-gateway-destination-endpoint-served";
const SUBSET_NAMESPACE = "envoy.lb.subset_hint";
const SUBSET_KEY = "x-gateway-destination-endpoint-subset";

export interface ProcessedRequestOptions {
  readonly settings: PickerSettings;
  readonly fleet: Fleet;
  readonly picker: EndpointPicker;
  readonly budget: BodyBudget;
  /** How many requests are in flight. */
  readonly inFlight: { requests: number };
}

/** A call of `ExternalProcessor.Process`. */
type ProcessCall = ServerDuplexStream<ProcessingRequest, ProcessingResponse>;

/** Serves the calls of `ExternalProcessor`. */
export function extProcService(options: ProcessedRequestOptions) {
  return { Process: (call: ProcessCall) => void new ProcessedRequest(call, options).serve() };
}

/**
 * One HTTP request at the gateway, which is one ext_proc stream. Its headers and its whole body are
 * read, then instances are chosen, and the body is passed on as it came. The answer passes
 * unchanged; its status and its end say how the instances did.
 */
class ProcessedRequest {
  readonly #call: ProcessCall;
  readonly #options: ProcessedRequestOptions;
  readonly #startedAtMs: number;
  readonly #order = new MessageOrder();
  /** Resolves when the gateway has closed the stream. */
  readonly #closed: Promise<void>;
  #headers: Record<string, string> = {};
  #path = "";
  #requestId: string | undefined = undefined;
  #subset: ReadonlySet<string> | undefined = undefined;
  /** The body while it comes. */
  #incoming: IncomingBody | undefined = undefined;
  /** The body when it has come. */
  #body: Buffer = Buffer.alloc(0);
  /** Runs from the begin of the stream until the body has come. */
  #timer: Timer | undefined = undefined;
  #choice: Choice | undefined = undefined;
  /** The visit of the decode instance that serves the request. */
  #decode: Visit | undefined = undefined;
  #status: number | undefined = undefined;
  #failure: KvError | undefined = undefined;
  #onRefused = () => {};

  constructor(call: ProcessCall, options: ProcessedRequestOptions) {
    this.#call = call;
    this.#options = options;
    this.#startedAtMs = options.fleet.ambient.clock.now();
    this.#closed = new Promise((resolve) => {
      call.once("cancelled", () => resolve());
      call.once("close", () => resolve());
    });
  }

  /** Serves the stream to its end. Never rejects. */
  async serve(): Promise<void> {
    const call = this.#call;
    const { fleet, inFlight, settings } = this.#options;
    const { receiveMs, requestMs } = settings.timeouts;
    const { clock } = fleet.ambient;
    inFlight.requests += 1;
    this.#timer = clock.setTimer(() => this.#refuse(tooSlow(receiveMs)), receiveMs);
    let limit: Timer | undefined;
    const refused = new Promise<void>((resolve, reject) => {
      this.#onRefused = resolve;
      limit = clock.setTimer(() => {
        this.#failure ??= neverEnded(requestMs);
        reject(this.#failure);
      }, requestMs);
    });
    try {
      await Promise.race([this.#readAll(), refused]);
      call.end();
    } catch (thrown) {
      // A stream that the gateway has closed ends the reading with an error.
      if (!call.cancelled) call.emit("error", grpcError(thrown));
    }
    limit?.cancel();
    this.#end();
    inFlight.requests -= 1;
  }

  async #readAll(): Promise<void> {
    // The stream's writable side outlives the loop.
    const messages: AsyncIterable<ProcessingRequest> = this.#call.iterator({
      destroyOnReturn: false,
    });
    for await (const message of messages) {
      if (this.#failure !== undefined) return;
      if (!this.#order.takes(message)) continue;
      if (message.request_headers !== undefined) requireFullDuplex(message);
      try {
        await this.#take(message);
      } catch (thrown) {
        if (this.#call.cancelled) return;
        this.#refuse(KvError.from(thrown, "KV_INTERNAL", "the picker failed"));
        return;
      }
    }
  }

  async #take(message: ProcessingRequest): Promise<void> {
    if (message.request_headers !== undefined) {
      this.#takeHeaders(message);
      if (message.request_headers.end_of_stream === true) await this.#pick();
    } else if (message.request_body !== undefined) {
      const { body, end_of_stream: isLast } = message.request_body;
      this.#takeBody(body);
      if (isLast === true) {
        await this.#pick();
        await this.#passBody(true);
      }
    } else if (message.request_trailers !== undefined) {
      await this.#pick();
      await this.#passBody(false);
      await this.#write({ request_trailers: {} });
    } else if (message.response_headers !== undefined) {
      this.#takeAnswer(message);
      await this.#write({ response_headers: {} });
    } else if (message.response_body !== undefined) {
      const { body, end_of_stream: isLast = false } = message.response_body;
      for (const response of bodyResponses("response_body", body ?? Buffer.alloc(0), isLast))
        await this.#write(response);
    } else if (message.response_trailers !== undefined)
      await this.#write({ response_trailers: {} });
  }

  #takeHeaders(message: ProcessingRequest): void {
    const { fleet, settings, inFlight, budget } = this.#options;
    const { limits } = settings;
    this.#headers = headersOf(message.request_headers ?? {});
    this.#path = (this.#headers[":path"] ?? "/").split("?", 1)[0] ?? "/";
    this.#requestId = requestIdOf(this.#headers, fleet.ambient.random);
    if (inFlight.requests > limits.requestsInFlight)
      throw overloaded({
        limit: "limits.requestsInFlight",
        message: `${limits.requestsInFlight} requests are in flight`,
        byClient: true,
      });
    const endpoints = metadataTexts(message, SUBSET_NAMESPACE, SUBSET_KEY);
    if (endpoints !== undefined && endpoints.length > limits.subsetEndpoints)
      throw new KvError("KV_REQUEST_INVALID", `the subset hint has ${endpoints.length} endpoints`, {
        hint: `the limit is ${limits.subsetEndpoints}, limits.subsetEndpoints`,
        details: { limit: "limits.subsetEndpoints" },
      });
    this.#subset = endpoints === undefined ? undefined : new Set(endpoints);
    requireServed(this.#headers[":method"] ?? "", this.#path);
    // What all gateways send counts together.
    const shared = { limits, budget, client: "" };
    this.#incoming = new IncomingBody(shared, this.#headers["content-length"], (error) =>
      this.#refuse(error),
    );
  }

  #takeBody(body: Buffer | undefined): void {
    if (body === undefined || body.length === 0) return;
    this.#incoming?.push(body);
  }

  /** Chooses instances for a request that has arrived, and answers its headers. */
  async #pick(): Promise<void> {
    const { fleet, picker } = this.#options;
    const { clock, metrics, tracer } = fleet.ambient;
    const arrivedAtMs = clock.now();
    this.#timer?.cancel();
    this.#incoming?.share.arrived();
    this.#body = this.#incoming?.take() ?? this.#body;
    const requestId = this.#requestId ?? "";
    const span = tracer?.start("kv_epp.pick", {
      kind: "server",
      parent: traceparentOf(this.#headers),
      attributes: { "kv.request_id": requestId, "url.path": this.#path },
    });
    try {
      const request = isGeneration(this.#path) ? await this.#parse(this.#path) : undefined;
      if (request === undefined && this.#body.length > 0)
        await checkDecodeBody(this.#body, fleet.parses);
      // The gateway has closed the stream, or was refused, while an instance rendered the prompt.
      if (this.#call.cancelled || this.#failure !== undefined) return;
      const choice = picker.pick({
        requestId,
        request,
        headers: this.#headers,
        subset: this.#subset,
      });
      this.#choice = choice;
      this.#decode = choice.decode;
      const destination = choice.decoders.map(endpointOf).join(",");
      const prefillers = choice.prefillers.map(withRank).join(",");
      span?.set({ "kv.decode": destination, "kv.prefill": prefillers || undefined });
      metrics.observe("kv_epp_pick_duration_seconds", (clock.now() - arrivedAtMs) / 1000);
      await this.#write({
        request_headers: {
          response: { header_mutation: this.#mutation(choice, destination, prefillers, span) },
        },
        dynamic_metadata: {
          fields: {
            [DESTINATION_NAMESPACE]: {
              structValue: { fields: { [DESTINATION_HEADER]: { stringValue: destination } } },
            },
          },
        },
      });
      span?.end();
    } catch (error) {
      span?.end(error);
      throw error;
    }
  }

  /**
   * The request, with the token ids of its prompt where the routing reads them and an instance
   * renders them.
   */
  async #parse(endpoint: Endpoint): Promise<GenerationRequest> {
    const { fleet } = this.#options;
    const request = await parseRequestInSteps(endpoint, this.#body, fleet.parses);
    const { prefill, decode } = fleet.pools;
    if (prefill.readsTokenIds() || decode.readsTokenIds())
      await fleet.addTokenIds(request, this.#headers);
    return request;
  }

  #mutation(
    choice: Choice,
    destination: string,
    prefillers: string,
    span: Span | undefined,
  ): object {
    const set: Record<string, string> = { [DESTINATION_HEADER]: destination };
    if (prefillers !== "") set[PREFILLER_HEADER] = prefillers;
    const rank = choice.decode.instance.dataParallelRank;
    if (rank !== undefined) set["x-data-parallel-rank"] = String(rank);
    if (this.#headers["x-request-id"] === undefined) set["x-request-id"] = this.#requestId ?? "";
    if (span !== undefined) set["traceparent"] = span.traceparent;
    // A client must not choose an instance.
    const removed = PEER_HEADERS.filter((name) => this.#headers[name] !== undefined);
    return headerMutation(set, prefillers === "" ? [PREFILLER_HEADER, ...removed] : removed);
  }

  /** Passes the request's body on. `isLast`: no trailers follow. */
  async #passBody(isLast: boolean): Promise<void> {
    const body = this.#body;
    this.#body = Buffer.alloc(0);
    for (const response of bodyResponses("request_body", body, isLast)) await this.#write(response);
    this.#incoming?.share.end();
  }

  /** The head of the answer: D has the prompt's KV, so the prefill instance has done its part. */
  #takeAnswer(message: ProcessingRequest): void {
    const status = Number(headersOf(message.response_headers ?? {})[":status"]);
    this.#status = status;
    // The gateway may answer a request itself before its body has come.
    this.#timer?.cancel();
    this.#incoming?.take();
    this.#incoming?.share.end();
    const { prefill, decoders } = this.#choice ?? {};
    if (status < 500) prefill?.succeeded();
    else prefill?.abandoned();
    const [named] = metadataTexts(message, DESTINATION_NAMESPACE, SERVED_KEY) ?? [];
    const served = named ?? upstreamAddress(message);
    const fallback = decoders?.slice(1).find((instance) => endpointOf(instance) === served);
    if (fallback === undefined || this.#decode === undefined) return;
    this.#failed(this.#decode, `the gateway could not use it, and used ${fallback.url}`, "connect");
    this.#decode = fallback.begin();
  }

  #failed(visit: Visit, why: string, stage: FailureStage): void {
    const { url } = visit.instance;
    const message = `the decode instance ${url} failed: ${why}`;
    visit.failed(
      new KvError("KV_PROXY_UPSTREAM_FAILED", message, {
        hint: `see the log of ${url}`,
        details: { role: "decode", instance: url, stage },
      }),
    );
    const instance = this.#choice?.decoders.find((one) => one === visit.instance);
    if (instance !== undefined) this.#options.fleet.check(instance);
  }

  /**
   * Writes one message. Where the gateway reads slowly, the promise resolves when it has read, or
   * has closed the stream.
   */
  async #write(message: ProcessingResponse): Promise<void> {
    const call = this.#call;
    if (call.cancelled || call.write(message)) return;
    await Promise.race([once(call, "drain").catch(() => {}), this.#closed]);
  }

  /** Has the gateway answer the client with an error, before the request has gone anywhere. */
  #refuse(error: KvError): void {
    if (this.#failure !== undefined || this.#choice !== undefined) return;
    this.#failure = error;
    this.#incoming?.take();
    this.#body = Buffer.alloc(0);
    const shown = errorForClient(error, this.#options.settings.exposeInstances);
    const { retryAfterSeconds } = error.details;
    const headers: Record<string, string> = { "content-type": "application/json" };
    if (this.#requestId !== undefined) headers["x-request-id"] = this.#requestId;
    if (typeof retryAfterSeconds === "number") headers["retry-after"] = String(retryAfterSeconds);
    const form = this.#path === "/v1/messages" ? "anthropic" : "openai";
    this.#call.write({
      immediate_response: {
        status: { code: refusalStatus(error) },
        headers: headerMutation(headers),
        body: Buffer.from(errorBody(shown, this.#requestId, form)),
        details: error.code,
      },
    });
    this.#onRefused();
  }

  /** Ends visits, and reports the request. */
  #end(): void {
    this.#timer?.cancel();
    this.#incoming?.share.end();
    const status = this.#status;
    if (this.#failure === undefined && status === undefined && this.#requestId !== undefined)
      this.#failure = new KvError(
        "KV_REQUEST_ABORTED",
        "the gateway closed the stream before an answer",
      );
    const decode = this.#decode;
    this.#choice?.prefill?.abandoned();
    if (decode !== undefined && status !== undefined && status >= 500)
      this.#failed(decode, `the answer was ${status}`, "status");
    else if (status === undefined) decode?.abandoned();
    else decode?.succeeded();
    this.#report(status);
  }

  #report(status: number | undefined): void {
    const { clock, log, metrics } = this.#options.fleet.ambient;
    const failure = this.#failure;
    const durationMs = clock.now() - this.#startedAtMs;
    const endpoint = endpointLabel(this.#path);
    const outcome = failure?.code ?? String(status);
    metrics.count("kv_proxy_requests_total", 1, { endpoint, outcome });
    metrics.observe("kv_proxy_request_duration_seconds", durationMs / 1000, { endpoint });
    const { limit } = failure?.details ?? {};
    if (typeof limit === "string") metrics.count("kv_proxy_refused_total", 1, { limit });
    const fields = {
      requestId: this.#requestId,
      endpoint: this.#path,
      status,
      durationMs,
      prefill: this.#choice?.prefill?.instance.url,
      decode: this.#decode?.instance.url,
    };
    if (failure === undefined) log.info("request-done", fields);
    else if (failure.code === "KV_REQUEST_ABORTED") log.info("request-aborted", fields);
    else {
      // The message of an error that the client has caused may repeat a value of its body.
      const { code, message, details } = failure;
      const shown =
        code === "KV_REQUEST_INVALID" ? { code, param: details.param } : { code, message };
      if (refusalStatus(failure) < 500) log.info("request-refused", { ...fields, ...shown });
      else log.warn("request-failed", { ...fields, ...shown });
    }
  }
}

/**
 * `ip:port`, with `@RANK` for one rank of a data-parallel server: the sidecar reads it, and llm-d's
 * knows no ranks.
 */
function withRank(instance: Instance): string {
  const { dataParallelRank: rank } = instance;
  return rank === undefined ? endpointOf(instance) : `${endpointOf(instance)}@${rank}`;
}
