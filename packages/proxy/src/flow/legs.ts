import {
  failureStage,
  type Instance,
  type InstancePool,
  type Pairing,
  type Role,
  type Visit,
} from "@kv/fleet";
import type {
  AutoscalingSignals,
  Fleet,
  PrefillCosts,
  RequestBody,
  UpstreamAnswer,
} from "@kv/fleet/front-end";
import { forwardedHeaders, legHeaders, usageOf } from "@kv/fleet/front-end";
import { type Ambient, KvError, type Span } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { decodeBody, prefillBody, singleInstanceBody } from "../request/leg-bodies.js";
import {
  endedVisit,
  type LegAnswer,
  readAnswerBegin,
  readLegAnswer,
  requireReadable,
} from "../response/leg-answer.js";
import { type PrefillOutcome, readPrefillAnswer } from "../response/prefill-answer.js";
import { badAnswer, badStatus, isServerFailure } from "../upstream/upstream-errors.js";
import { tryInstances } from "./attempts.js";
import type { ClientRequest, Part } from "./client-request.js";
import { startLegSpan, withSpan } from "./leg-spans.js";
import { releaseBlocks } from "./release-blocks.js";

export interface DecodeLegOptions {
  /** The prefill instance whose KV the leg reads: only decode instances that fit it are chosen. */
  readonly prefill?: Instance | undefined;
  /** Until when the prefill worker surely holds the blocks, on the proxy's clock. After that nothing is sent: `KV_LEASE_EXPIRED`. */
  readonly leaseEndsAtMs?: number | undefined;
  /** Called when an instance may have received the KV parameters. */
  readonly onSent?: (() => void) | undefined;
}

interface GenerationLeg extends DecodeLegOptions {
  readonly role: Role;
  readonly body: RequestBody;
  /** The request goes to one instance unsplit. It may have several choices, and a failure is tried on one more instance. */
  readonly whole?: boolean | undefined;
  /** No other instance holds anything for the leg, so a failure is tried on one more instance. */
  readonly alone?: boolean | undefined;
}

/** Runs single legs at the instances of both roles: retries, time limits, checks of the answer, records and spans. */
export class Legs {
  readonly prefillers: InstancePool;
  readonly decoders: InstancePool;
  /** Undefined where pairing is off. */
  readonly pairing: Pairing | undefined;
  readonly settings: ProxySettings;
  readonly ambient: Ambient;
  /** The names of the clients' headers that instances get. */
  readonly forwarded: ReadonlySet<string>;
  readonly signals: AutoscalingSignals;
  /** What prompts cost at the prefill instances. */
  readonly prefillCosts: PrefillCosts;
  readonly #fleet: Fleet;
  readonly #background = new Set<Promise<void>>();

  constructor(fleet: Fleet, settings: ProxySettings) {
    this.#fleet = fleet;
    this.prefillers = fleet.pools.prefill;
    this.decoders = fleet.pools.decode;
    this.pairing = fleet.pairing;
    this.ambient = fleet.ambient;
    this.signals = fleet.signals;
    this.prefillCosts = fleet.prefillCosts;
    this.settings = settings;
    this.forwarded = forwardedHeaders(settings.forwardHeaders);
  }

  /** Whether a routing strategy reads the token ids of prompts. */
  get readsTokenIds(): boolean {
    return this.prefillers.readsTokenIds() || this.decoders.readsTokenIds();
  }

  /** Has an instance render the prompt of a request, and adds its token ids to the request. */
  async addTokenIds({ request, headers }: ClientRequest): Promise<void> {
    request.tokenIds = await this.#fleet.renderer.tokenIds(request, headers);
  }

  /**
   * Sends the prompt to a prefill instance. `kvRequest` (JSON text) makes it keep the KV. With `only`, that instance is visited and no other.
   * Errors: `KV_PROXY_UPSTREAM_FAILED`, `KV_PROXY_NO_INSTANCE`, the deadline's reason.
   */
  async prefill(part: Part, kvRequest: string, only?: Visit): Promise<PrefillOutcome> {
    const { clock, log } = this.ambient;
    const { limits, timeouts } = this.settings;
    const { deadline, record, attempts } = part;
    const body = prefillBody(part.request, kvRequest, part.requestId);
    let serverFailure: PrefillOutcome | undefined;

    const leg = async (visit: Visit): Promise<PrefillOutcome> => {
      const { instance } = visit;
      const { url } = instance;
      const startedAtMs = clock.now();
      const wasAlone = instance.inFlight === 1;
      record.prefill = url;
      record.prefillStartedAtMs = startedAtMs;
      const span = startLegSpan(this.ambient.tracer, part, instance);
      const { charactersPerToken } = this.prefillCosts;
      const expected = this.prefillers.cachedTokens(instance, part, charactersPerToken);
      record.expectedCachedTokens = expected;
      try {
        const answer = await this.#send(part, instance, span, body);
        requireReadable(instance.role, instance.url, answer);
        const limitBytes = limits.prefillAnswerLengthBytes;
        const { bytes, complete } =
          answer.body.readBuffered(limitBytes) ?? (await answer.body.readLimited(limitBytes));
        if (!complete) {
          answer.discard();
          throw badAnswer("prefill", url, `answered with more than ${limitBytes} bytes`);
        }
        const nowMs = clock.now();
        record.prefillMs = nowMs - startedAtMs;
        const outcome = readPrefillAnswer(instance, answer, bytes, nowMs);
        if (outcome.kind === "error" && isServerFailure(answer.status)) {
          serverFailure = outcome;
          throw badStatus("prefill", url, answer.status);
        }
        visit.succeeded();
        if (outcome.kind === "kv") {
          const { usage } = outcome.fields;
          const durationMs = nowMs - startedAtMs;
          this.prefillCosts.ended({ request: part.request, usage, durationMs, wasAlone });
          record.cachedTokens = usageOf(usage).cachedTokens;
          span?.set({ "kv.cached_tokens": record.cachedTokens });
          this.#signalPrefill(usage, durationMs, expected);
        }
        part.onPrefilled?.(instance);
        span?.set({ "http.response.status_code": answer.status });
        span?.end();
        return outcome;
      } catch (error) {
        span?.end(deadline.reasonOr(error));
        throw error;
      }
    };

    const { prefillRetries: retries, failedPrefill: avoid } = attempts;
    const partner = { avoiding: attempts.failedDecode };
    deadline.startPhase("the prefill leg", timeouts.prefillMs);
    try {
      return await tryInstances(
        { pool: this.prefillers, context: part, deadline, retries, avoid, partner, only, log },
        leg,
      );
    } catch (error) {
      // No other instance gave a better answer, so the client gets this one.
      if (serverFailure !== undefined && failureStage(error) === "status") return serverFailure;
      throw error;
    } finally {
      deadline.endPhase();
    }
  }

  /**
   * Sends a part to a decode instance, with the KV parameters (JSON text) that the prefill worker answered. The caller ends the visit of the
   * answer. Errors: `KV_PROXY_UPSTREAM_FAILED`, `KV_PROXY_NO_INSTANCE`, `KV_LEASE_EXPIRED`, the deadline's reason.
   */
  decode(part: Part, kvTransferParams: string, options?: DecodeLegOptions): Promise<LegAnswer> {
    return this.#generate(part, {
      role: "decode",
      body: decodeBody(part.request, kvTransferParams, part.requestId),
      ...options,
    });
  }

  /** Has a decode instance compute the prompt of a part and generate. `reason` is logged. Errors: as `decode`. */
  decodeAlone(part: Part, reason: string): Promise<LegAnswer> {
    this.#countDecodeAlone(part, reason);
    return this.#generate(part, { role: "decode", body: singleInstanceBody(part.request) });
  }

  /** Has a decode instance compute the prompt of a part, as a prefill leg would not pay. Errors: as `decode`. */
  decodeOnly(part: Part): Promise<LegAnswer> {
    return this.#generate(part, { role: "decode", body: singleInstanceBody(part.request), alone: true });
  }

  /** Sends a request that cannot be split to a decode instance as it is. `reason` is logged. Errors: as `decode`. */
  decodeWhole(part: Part, reason: string): Promise<LegAnswer> {
    this.#countDecodeAlone(part, reason);
    return this.#generate(part, { role: "decode", body: singleInstanceBody(part.request), whole: true });
  }

  /** Of a sidecar: sends a request that names no prefill instance to the decode instance as it is. Errors: as `decode`. */
  decodeUnnamed(part: Part): Promise<LegAnswer> {
    this.ambient.metrics.count("kv_proxy_disaggregation_total", 1, { legs: "1", reason: "no-prefiller" });
    return this.#generate(part, { role: "decode", body: singleInstanceBody(part.request), whole: true });
  }

  /** Sends a request that concerns the prompt alone to a prefill instance, whose answer is the client's. Errors: as `prefill`. */
  promptOnly(part: Part): Promise<LegAnswer> {
    return this.#generate(part, { role: "prefill", body: singleInstanceBody(part.request), whole: true });
  }

  /**
   * Has the blocks of a prefill worker freed that no decode leg will read, in the background: else they are held until their lease ends. The
   * prefill worker has no call for it, so a decode instance gets a request that it refuses (see `releaseBody`).
   */
  release(part: Part, kvTransferParams: string, prefill: Instance): void {
    this.inBackground(releaseBlocks(this, this.#fleet.upstream, part, kvTransferParams, prefill));
  }

  /** Keeps `settled` waiting for work that goes on after its request has its answer. */
  inBackground(work: Promise<unknown>): void {
    const done: Promise<void> = work.then(() => void this.#background.delete(done));
    this.#background.add(done);
  }

  /** Resolves when no work goes on in the background. */
  async settled(): Promise<void> {
    await Promise.all(this.#background);
  }

  async #generate(
    part: Part,
    {
      role,
      body,
      leaseEndsAtMs = Number.POSITIVE_INFINITY,
      onSent,
      prefill,
      whole = false,
      alone = whole,
    }: GenerationLeg,
  ): Promise<LegAnswer> {
    const { clock, log } = this.ambient;
    const { limits, timeouts } = this.settings;
    const { request, requestId, deadline, record, attempts } = part;
    const decoding = role === "decode";
    const startedAtMs = clock.now();
    if (decoding) record.decodeStartedAtMs = startedAtMs;
    else record.prefillStartedAtMs = startedAtMs;
    let serverFailure: LegAnswer | undefined;

    const leg = async (visit: Visit): Promise<LegAnswer> => {
      const { instance } = visit;
      if (clock.now() >= leaseEndsAtMs) throw leaseExpired(requestId);
      record[role] = instance.url;
      const span = startLegSpan(this.ambient.tracer, part, instance);
      let answer: UpstreamAnswer | undefined;
      try {
        answer = await this.#send(part, instance, span, body, onSent);
        requireReadable(instance.role, instance.url, answer);
        const begin = await readAnswerBegin(answer, limits.heldAnswerLengthBytes);
        const expected = { onePart: !whole, streamed: request.fields.stream === true };
        const legAnswer = readLegAnswer(request.endpoint, withSpan(visit, span), begin, expected);
        const firstByteMs = clock.now() - startedAtMs;
        if (decoding) {
          record.firstByteMs = firstByteMs;
          record.streamed = begin.eventStream;
        } else record.prefillMs = firstByteMs;
        span?.set({ "http.response.status_code": answer.status, "kv.first_byte_ms": firstByteMs });
        if (!alone || !isServerFailure(legAnswer.status) || legAnswer.rest !== undefined) return legAnswer;
        serverFailure = { ...legAnswer, visit: endedVisit(instance) };
        throw badStatus(role, instance.url, legAnswer.status);
      } catch (error) {
        answer?.discard();
        if (decoding && !deadline.aborted) attempts.failedDecode.add(instance);
        span?.end(deadline.reasonOr(error));
        throw error;
      }
    };

    const pool = decoding ? this.decoders : this.prefillers;
    const avoid = decoding ? attempts.failedDecode : undefined;
    deadline.startPhase(`the ${role} leg's first byte`, timeouts.firstByteMs);
    try {
      return await tryInstances(
        { pool, context: part, deadline, retries: alone ? 1 : 0, avoid, partner: prefill, log },
        leg,
      );
    } catch (error) {
      // No other instance gave a better answer, so the client gets this one.
      if (serverFailure !== undefined && failureStage(error) === "status") return serverFailure;
      throw error;
    } finally {
      deadline.endPhase();
    }
  }

  #send(
    part: Part,
    instance: Instance,
    span: Span | undefined,
    body: RequestBody,
    onSent?: () => void,
  ): Promise<UpstreamAnswer> {
    return this.#fleet.upstream.send({
      role: instance.role,
      url: instance.url,
      method: "POST",
      path: part.request.endpoint,
      headers: legHeaders({
        clientHeaders: part.headers,
        forwarded: this.forwarded,
        requestId: part.requestId,
        instance,
        traceparent: span?.traceparent,
      }),
      body,
      abort: part.deadline,
      onSent,
    });
  }

  /** A leg that waited behind others took longer than its prompt kept the instance busy. */
  #signalPrefill(usage: unknown, durationMs: number, expectedCachedTokens = 0): void {
    const { promptTokens = 0, cachedTokens } = usageOf(usage);
    const { metrics } = this.ambient;
    const estimatedMs = this.prefillCosts.legMs(Math.max(0, promptTokens - cachedTokens)) ?? durationMs;
    this.signals.prefilled(promptTokens, cachedTokens, Math.min(durationMs, estimatedMs));
    if (promptTokens > 0) metrics.count("kv_proxy_prompt_tokens_total", promptTokens);
    if (cachedTokens > 0) metrics.count("kv_proxy_cached_prompt_tokens_total", cachedTokens);
    if (expectedCachedTokens > 0)
      metrics.count("kv_proxy_expected_cached_prompt_tokens_total", expectedCachedTokens);
  }

  #countDecodeAlone(part: Part, reason: string): void {
    this.ambient.log.warn("decode-computes", { requestId: part.requestId, reason });
    this.ambient.metrics.count("kv_proxy_decode_alone_total");
  }
}

function leaseExpired(requestId: string): KvError {
  return new KvError(
    "KV_LEASE_EXPIRED",
    `no decode instance took request ${requestId} while the lease of its blocks lasted`,
    { hint: "raise kv_lease_duration on the prefill side, and timeouts.leaseMs here with it" },
  );
}
