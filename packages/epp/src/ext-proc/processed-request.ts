import { once } from "node:events";
import type { ServerDuplexStream } from "@grpc/grpc-js";
import type { FailureStage, Instance, Visit } from "@kv/fleet";
import {
  checkDecodeBody,
  type Endpoint,
  type Fleet,
  type GenerationRequest,
  KV_SOURCE_HEADER,
  type KvSource,
  PREFILLER_HEADER,
  parseRequestInSteps,
  reportEnd,
  requestIdOf,
  traceparentOf,
} from "@kv/fleet/front-end";
import {
  BodyBudget,
  errorBody,
  errorForClient,
  IncomingBody,
  overloaded,
  refusedRequest,
  shortened,
  statusOf,
} from "@kv/http";
import { KvError, type Span, type Timer } from "@kv/interface";
import type { PickerSettings } from "../config/settings.js";
import { type Choice, EndpointPicker, endpointOf } from "../pick/endpoint-picker.js";
import { AnswerFaults, type AnswerHead } from "./answer-faults.js";
import {
  bodyResponses,
  endpointLabel,
  grpcError,
  type HttpBody,
  headerMutation,
  headersOf,
  isGeneration,
  MessageOrder,
  type MessagePart,
  metadataTexts,
  type ProcessingRequest,
  type ProcessingResponse,
  requireFullDuplex,
  requireServed,
  upstreamAddress,
} from "./messages.js";

/** Takes `ip:port`, or several in order, separated by commas. */
const DESTINATION_HEADER = "x-gateway-destination-endpoint";
/** llm-d's sidecar takes further instances from these headers. */
const PEER_HEADERS = ["x-encoder-hosts-ports", "x-data-parallel-host-port", KV_SOURCE_HEADER];
const NO_BYTES: Buffer = Buffer.alloc(0);
const DESTINATION_NAMESPACE = "envoy.lb";
const SERVED_KEY = "x-gateway-destination-endpoint-served";
const SUBSET_NAMESPACE = "envoy.lb.subset_hint";
const SUBSET_KEY = "x-gateway-destination-endpoint-subset";

type ProcessCall = ServerDuplexStream<ProcessingRequest, ProcessingResponse>;

/** The ext_proc service, and what its requests share. */
export class ExtProc {
  readonly picker: EndpointPicker;
  readonly budget: BodyBudget;
  readonly faults = new AnswerFaults();
  requestsInFlight = 0;

  constructor(
    readonly fleet: Fleet,
    readonly settings: PickerSettings,
  ) {
    this.picker = new EndpointPicker({ fleet, settings });
    const { bodiesLengthBytes } = settings.limits;
    // As of one client: to a gateway 503 means a picker without instances, and 429 an overload.
    this.budget = new BodyBudget({
      bodiesLengthBytes,
      bodiesPerClientLengthBytes: bodiesLengthBytes,
    });
  }

  service() {
    return { Process: (call: ProcessCall) => void new ProcessedRequest(call, this).serve() };
  }
}

/**
 * One HTTP request, which is one ext_proc stream. It chooses instances once the body is whole.
 * Bodies pass unchanged.
 */
class ProcessedRequest {
  readonly #startedAtMs: number;
  readonly #order = new MessageOrder();
  readonly #closed: Promise<void>;
  #headers: Record<string, string> = {};
  #path = "";
  #requestId: string | undefined;
  #subset: ReadonlySet<string> | undefined;
  #incoming: IncomingBody | undefined;
  #body: Buffer = NO_BYTES;
  #timer: Timer | undefined;
  #choice: Choice | undefined;
  #decode: Visit | undefined;
  #answer: AnswerHead | undefined;
  #failure: KvError | undefined;
  #onRefused = () => {};

  constructor(
    private readonly call: ProcessCall,
    private readonly extProc: ExtProc,
  ) {
    this.#startedAtMs = extProc.fleet.ambient.clock.now();
    this.#closed = new Promise((resolve) => {
      call.once("cancelled", () => resolve());
      call.once("close", () => resolve());
    });
  }

  /** Never rejects. */
  async serve(): Promise<void> {
    const call = this.call;
    const { fleet, settings } = this.extProc;
    const { receiveMs, requestMs } = settings.timeouts;
    const { clock } = fleet.ambient;
    this.extProc.requestsInFlight += 1;
    this.#timer = clock.setTimer(() => {
      const message = `the body did not arrive within ${receiveMs} ms`;
      const details = { httpStatus: 408, limit: "timeouts.receiveMs" };
      this.#refuse(new KvError("KV_REQUEST_TIMEOUT", message, { details }));
    }, receiveMs);
    let limit: Timer | undefined;
    const refused = new Promise<void>((resolve, reject) => {
      this.#onRefused = resolve;
      limit = clock.setTimer(() => {
        // Without an end, it would stay in its instances' load.
        const message = `the gateway has not ended the stream within ${requestMs} ms`;
        this.#failure ??= new KvError("KV_REQUEST_TIMEOUT", message, {
          hint: "timeouts.requestMs sets the limit",
          details: { limit: "timeouts.requestMs" },
        });
        reject(this.#failure);
      }, requestMs);
    });
    try {
      await Promise.race([this.#readAll(), refused]);
      call.end();
    } catch (thrown) {
      // A stream that the gateway closed also ends here.
      if (!call.cancelled) call.emit("error", grpcError(thrown));
    }
    limit?.cancel();
    this.#end();
    this.extProc.requestsInFlight -= 1;
  }

  async #readAll(): Promise<void> {
    // The stream's writable side outlives the loop.
    const messages: AsyncIterable<ProcessingRequest> = this.call.iterator({
      destroyOnReturn: false,
    });
    for await (const message of messages) {
      if (this.#failure !== undefined) return;
      const part = this.#order.partIn(message);
      if (part === undefined) continue;
      if (part === "request_headers") requireFullDuplex(message);
      try {
        await this.#take(part, message);
      } catch (thrown) {
        if (this.call.cancelled) return;
        this.#refuse(KvError.from(thrown, "KV_INTERNAL", "the picker failed"));
        return;
      }
    }
  }

  async #take(part: MessagePart, message: ProcessingRequest): Promise<void> {
    const { body = NO_BYTES, end_of_stream: isLast = false }: HttpBody = message[part] ?? {};
    switch (part) {
      case "request_headers":
        this.#takeHeaders(message);
        if (isLast) await this.#pick();
        return;
      case "request_body":
        if (body.length > 0) this.#incoming?.push(body);
        if (!isLast) return;
        await this.#pick();
        return this.#passBody(true);
      case "request_trailers":
        await this.#pick();
        await this.#passBody(false);
        break;
      case "response_headers":
        this.#takeAnswer(message);
        break;
      case "response_body":
        for (const response of bodyResponses(part, body, isLast)) await this.#write(response);
        return;
    }
    await this.#write({ [part]: {} });
  }

  #takeHeaders(message: ProcessingRequest): void {
    const { fleet, settings, budget, requestsInFlight } = this.extProc;
    const { limits } = settings;
    this.#headers = headersOf(message.request_headers ?? {});
    this.#path = (this.#headers[":path"] ?? "/").split("?", 1)[0] ?? "/";
    this.#requestId = requestIdOf(this.#headers, fleet.ambient.random);
    if (requestsInFlight > limits.requestsInFlight)
      throw overloaded({
        limit: "limits.requestsInFlight",
        message: `${limits.requestsInFlight} requests are in flight`,
        byClient: true,
      });
    const endpoints = metadataTexts(message, SUBSET_NAMESPACE, SUBSET_KEY);
    if (endpoints !== undefined && endpoints.length > limits.subsetEndpoints)
      throw refusedRequest(
        400,
        `the subset hint has ${endpoints.length} endpoints`,
        `the limit is ${limits.subsetEndpoints}, limits.subsetEndpoints`,
        { limit: "limits.subsetEndpoints" },
      );
    this.#subset = endpoints === undefined ? undefined : new Set(endpoints);
    requireServed(this.#headers[":method"] ?? "", this.#path);
    // One budget counts what all gateways send.
    const shared = { limits, budget, client: "" };
    this.#incoming = new IncomingBody(shared, this.#headers["content-length"], (error) =>
      this.#refuse(error),
    );
  }

  async #pick(): Promise<void> {
    const { fleet, picker } = this.extProc;
    const { clock, metrics, tracer } = fleet.ambient;
    const arrivedAtMs = clock.now();
    this.#timer?.cancel();
    this.#incoming?.share.arrived();
    this.#body = this.#incoming?.take() ?? this.#body;
    const requestId = this.#requestId ?? "";
    const span = tracer?.start("kv_epp.pick", {
      kind: "server",
      parent: traceparentOf(this.#headers),
      attributes: { "kv.request_id": requestId, "url.path": shortened(this.#path) },
    });
    try {
      const request = isGeneration(this.#path) ? await this.#parse(this.#path) : undefined;
      if (request === undefined && this.#body.length > 0)
        await checkDecodeBody(this.#body, fleet.parses);
      // The gateway may have gone while an instance rendered the prompt.
      if (this.call.cancelled || this.#failure !== undefined) return;
      const context = { requestId, request, headers: this.#headers, subset: this.#subset };
      const { kvSources } = fleet;
      if (request !== undefined) kvSources?.askedFor(request);
      const holders = (await kvSources?.holders(context)) ?? [];
      const preferredPrefill = kvSources?.soonerThanChosen(context, holders, new Set());
      const choice = picker.pick({ ...context, preferredPrefill });
      this.#choice = choice;
      this.#decode = choice.decode;
      const { prefill } = choice;
      const source = prefill && kvSources?.sourceFor(prefill.instance, context, holders);
      metrics.observe("kv_epp_pick_duration_seconds", (clock.now() - arrivedAtMs) / 1000);
      await this.#write(this.#chosen(choice, source, span));
      span?.end();
    } catch (error) {
      span?.end(error);
      throw error;
    }
  }

  async #parse(endpoint: Endpoint): Promise<GenerationRequest> {
    const { fleet } = this.extProc;
    const request = await parseRequestInSteps(endpoint, this.#body, fleet.parses);
    const { prefill, decode } = fleet.pools;
    const { kvSources } = fleet;
    if (prefill.readsTokenIds() || decode.readsTokenIds() || kvSources?.readsTokenIds())
      await fleet.addTokenIds(request, this.#headers);
    return request;
  }

  #chosen(choice: Choice, source: KvSource | undefined, span: Span | undefined): object {
    const destination = choice.decoders.map(endpointOf).join(",");
    const prefillers = choice.prefillers.map(withRank).join(",");
    span?.set({ "kv.decode": destination, "kv.prefill": prefillers || undefined });
    const set: Record<string, string> = { [DESTINATION_HEADER]: destination };
    if (prefillers !== "") set[PREFILLER_HEADER] = prefillers;
    if (source !== undefined)
      set[KV_SOURCE_HEADER] = source.instance ? endpointOf(source.instance) : source.peer;
    const rank = choice.decode.instance.dataParallelRank;
    if (rank !== undefined) set["x-data-parallel-rank"] = String(rank);
    if (this.#headers["x-request-id"] === undefined) set["x-request-id"] = this.#requestId ?? "";
    if (span !== undefined) set["traceparent"] = span.traceparent;
    // A client must not choose an instance.
    const removed = PEER_HEADERS.filter(
      (name) => this.#headers[name] !== undefined && set[name] === undefined,
    );
    const remove = prefillers === "" ? [PREFILLER_HEADER, ...removed] : removed;
    const fields = { [DESTINATION_HEADER]: { stringValue: destination } };
    return {
      request_headers: { response: { header_mutation: headerMutation(set, remove) } },
      dynamic_metadata: { fields: { [DESTINATION_NAMESPACE]: { structValue: { fields } } } },
    };
  }

  /** `isLast`: no trailers follow. */
  async #passBody(isLast: boolean): Promise<void> {
    const body = this.#body;
    this.#body = NO_BYTES;
    for (const response of bodyResponses("request_body", body, isLast)) await this.#write(response);
    this.#incoming?.share.end();
  }

  /** D has the prompt's KV now, so the prefill visit ends. */
  #takeAnswer(message: ProcessingRequest): void {
    const headers = headersOf(message.response_headers ?? {});
    const status = Number(headers[":status"]);
    const contentType = headers["content-type"];
    this.#answer = { path: this.#path, headers: this.#headers, status, contentType };
    // The gateway may answer before the body has come.
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
    if (instance !== undefined) this.extProc.fleet.check(instance);
  }

  async #write(message: ProcessingResponse): Promise<void> {
    const call = this.call;
    if (call.cancelled || call.write(message)) return;
    await Promise.race([once(call, "drain").catch(() => {}), this.#closed]);
  }

  #refuse(error: KvError): void {
    if (this.#failure !== undefined || this.#choice !== undefined) return;
    this.#failure = error;
    this.#incoming?.take();
    this.#body = NO_BYTES;
    const shown = errorForClient(error, this.extProc.settings.exposeInstances);
    const { retryAfterSeconds } = error.details;
    const headers: Record<string, string> = { "content-type": "application/json" };
    if (this.#requestId !== undefined) headers["x-request-id"] = this.#requestId;
    if (typeof retryAfterSeconds === "number") headers["retry-after"] = String(retryAfterSeconds);
    const form = this.#path === "/v1/messages" ? "anthropic" : "openai";
    this.call.write({
      immediate_response: {
        status: { code: statusOf(error) },
        headers: headerMutation(headers),
        body: Buffer.from(errorBody(shown, this.#requestId, form)),
        details: error.code,
      },
    });
    this.#onRefused();
  }

  #end(): void {
    this.#timer?.cancel();
    this.#incoming?.share.end();
    const answer = this.#answer;
    if (this.#failure === undefined && answer === undefined && this.#requestId !== undefined)
      this.#failure = new KvError(
        "KV_REQUEST_ABORTED",
        "the gateway closed the stream before an answer",
      );
    const decode = this.#decode;
    this.#choice?.prefill?.abandoned();
    if (answer === undefined) decode?.abandoned();
    else if (decode !== undefined) this.#endVisit(decode, answer);
    this.#report(answer?.status);
  }

  #endVisit(visit: Visit, answer: AnswerHead): void {
    const { status, contentType } = answer;
    const blame = this.extProc.faults.of(visit.instance, answer);
    if (blame === "none") visit.succeeded();
    else if (blame === "unknown") visit.abandoned();
    else {
      const what = status < 300 ? `${status} with ${contentType}` : `${status}`;
      this.#failed(visit, `the answer was ${what}`, "status");
    }
  }

  #report(status: number | undefined): void {
    const { ambient } = this.extProc.fleet;
    const durationMs = ambient.clock.now() - this.#startedAtMs;
    const fields = {
      requestId: this.#requestId,
      endpoint: shortened(this.#path),
      status,
      durationMs,
      prefill: this.#choice?.prefill?.instance.url,
      decode: this.#decode?.instance.url,
    };
    reportEnd(ambient, {
      endpoint: endpointLabel(this.#path),
      status: status ?? 0,
      failure: this.#failure,
      durationMs,
      fields,
    });
  }
}

/** This project's sidecar reads `@RANK`; llm-d's does not. */
function withRank(instance: Instance): string {
  const { dataParallelRank: rank } = instance;
  return rank === undefined ? endpointOf(instance) : `${endpointOf(instance)}@${rank}`;
}
