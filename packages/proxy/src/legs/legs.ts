import {
  type Instance,
  type InstancePool,
  instanceName,
  type Partner,
  type Role,
  type RoutingContext,
  type Visit,
} from "@kv/fleet";
import {
  type Fleet,
  legHeaders,
  type RequestBody,
  traceparentOf,
  type UpstreamAnswer,
} from "@kv/fleet/front-end";
import {
  type Ambient,
  KvError,
  type KvTransferParams,
  type Span,
  type Tracer,
} from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { decodeBody, prefillBody, singleInstanceBody } from "../request/leg-bodies.js";
import {
  cachedTokensOf,
  isEventStream,
  type LegAnswer,
  type PrefillOutcome,
  readLegAnswer,
  readPassedAnswer,
  readPrefillAnswer,
} from "../response/leg-answer.js";
import type { Disaggregation } from "../telemetry/request-record.js";
import {
  badStatus,
  type Fault,
  faultOf,
  faultOfStatus,
  leaseExpired,
  noInstance,
  tooLong,
} from "../upstream/upstream-errors.js";
import type { Part, Requester } from "./client-request.js";
import { MissingModels } from "./missing-models.js";
import type { HeldBlocks, Tries } from "./tries.js";

/** Has a value or an error. */
export interface LegEnd<T> {
  readonly fault?: Fault | undefined;
  readonly value?: T | undefined;
  readonly error?: KvError | undefined;
}

interface LegValue {
  readonly status: number;
  /** Set for an answer that passes on. Whoever passes it on ends the visit. */
  readonly visit?: Visit;
  discard?(): void;
}

/** @throws The leg's error. */
export function legValue<T>({ value, error }: LegEnd<T>): T {
  if (error !== undefined) throw error;
  return value as T;
}

interface DecodeLegKv {
  /** P's KV parameters as JSON text. */
  readonly params: string;
  /** Whose KV the leg reads. Only decode instances that fit it are chosen. */
  readonly prefill: Instance;
  /** Learns what the leg does with that KV. */
  readonly held: HeldBlocks;
  /**
   * Until when P surely holds the blocks, on the proxy's clock. Later tries end with
   * `KV_LEASE_EXPIRED`.
   */
  readonly leaseEndsAtMs?: number | undefined;
}

/** Why one instance serves a part. */
type SingleLeg = "no-kv" | "unsplittable" | "one-leg-pays" | "unnamed" | "asks-about-prompt";

interface PrefillLegOptions {
  /** Visits this instance once, and no other. */
  readonly only?: Visit | undefined;
  /** Tokens of an ended turn that P reads from D. */
  readonly readTokens?: number | undefined;
  /** Default: the time limit of the settings. */
  readonly limitMs?: number | undefined;
}

interface TryOptions {
  readonly role: Role;
  /** Names the time limit of all tries together. */
  readonly phase: string;
  readonly limitMs: number;
  /** Only instances that fit the partner are chosen. */
  readonly partner?: Partner | undefined;
  /** Visits this instance and no other. */
  readonly only?: Visit | undefined;
  /**
   * Other instances are tried only while no engine has seen the request.
   * @default for `only`
   */
  readonly once?: boolean | undefined;
}

interface SentLeg {
  readonly path: string;
  /** Without a body the leg is a GET. */
  readonly body: RequestBody | undefined;
  readonly span?: Span | undefined;
  readonly fresh?: boolean | undefined;
  readonly onSent?: (() => void) | undefined;
}

export class Legs {
  readonly prefillers: InstancePool;
  readonly decoders: InstancePool;
  readonly ambient: Ambient;
  /** Undefined until an instance lacks a model. */
  missing: MissingModels | undefined;
  readonly #background = new Set<Promise<void>>();

  constructor(
    readonly fleet: Fleet,
    readonly settings: ProxySettings,
  ) {
    this.prefillers = fleet.pools.prefill;
    this.decoders = fleet.pools.decode;
    this.ambient = fleet.ambient;
  }

  /**
   * `kvRequest` (JSON text) makes the prefill instance keep the KV.
   * @throws The deadline's reason.
   */
  async prefill(
    part: Part,
    kvRequest: string,
    { only, readTokens, limitMs = this.settings.timeouts.prefillMs }: PrefillLegOptions = {},
  ): Promise<LegEnd<PrefillOutcome>> {
    if (part.isSplit === true) await this.fleet.partTurn();
    const partner = { avoiding: part.attempts.decode.avoided };
    return this.#try(
      part,
      { role: "prefill", phase: "the prefill leg", limitMs, partner, only },
      (visit, { fresh }) => this.#prefillAt(visit, part, kvRequest, fresh, readTokens),
    );
  }

  /**
   * Sends a part to a decode instance with P's KV parameters. Once an engine may have
   * seen the blocks, it may have told P to free them, so they are not tried again. The caller ends
   * the answer's visit.
   * @throws The deadline's reason.
   */
  decode(part: Part, kv: DecodeLegKv): Promise<LegEnd<LegAnswer>> {
    return this.#generate(part, "decode", true, kv);
  }

  /**
   * Has one instance compute the prompt and generate. `why`: P kept no KV (`no-kv`), the request
   * cannot be split (`unsplittable`), a prefill leg does not pay (`one-leg-pays`), a sidecar's
   * request names no P (`unnamed`), or the answer tells of the prompt: P's (`asks-about-prompt`).
   * @throws As `legValue`, the deadline's reason.
   */
  async single(part: Part, why: SingleLeg, reason?: string): Promise<LegAnswer> {
    const { log, metrics } = this.ambient;
    if (why === "no-kv" || why === "unsplittable") {
      log.warn("decode-computes", { requestId: part.requestId, reason });
      metrics.count("kv_proxy_decode_alone_total");
    } else if (why === "unnamed")
      metrics.count("kv_proxy_disaggregation_total", 1, { legs: "1", reason: "no-prefiller" });
    const onePart = why === "no-kv" || why === "one-leg-pays";
    const role = why === "asks-about-prompt" ? "prefill" : "decode";
    return legValue(await this.#generate(part, role, onePart));
  }

  /**
   * Has the decode instance of `only`, or any, answer a request unchanged.
   * @throws As `legValue`, the deadline's reason.
   */
  async pass(
    requester: Requester,
    path: string,
    body: RequestBody | undefined,
    only?: Visit,
  ): Promise<LegAnswer> {
    const phase = "the answer of the decode instance";
    const limitMs = this.settings.timeouts.firstByteMs;
    const { record } = requester;
    record.decodeStartedAtMs = this.ambient.clock.now();
    const end = await this.#try(
      requester,
      { role: "decode", phase, limitMs, only },
      (visit, { fresh }) =>
        this.#answerAt(visit, requester, { path, body, fresh }, readPassedAnswer),
    );
    return legValue(end);
  }

  /** `settled` awaits this work, which outlives its request. */
  inBackground(work: Promise<unknown>): void {
    const done: Promise<void> = work.then(() => void this.#background.delete(done));
    this.#background.add(done);
  }

  async settled(): Promise<void> {
    await Promise.all(this.#background);
  }

  send(
    { headers, requestId, deadline }: Pick<Requester, "headers" | "requestId" | "deadline">,
    instance: Instance,
    { path, body, span, fresh, onSent }: SentLeg,
  ): Promise<UpstreamAnswer> {
    return this.fleet.upstream.send({
      role: instance.role,
      url: instance.url,
      method: body === undefined ? "GET" : "POST",
      path,
      headers: legHeaders({
        clientHeaders: headers,
        forwarded: this.fleet.forwarded[instance.role],
        requestId,
        instance,
        traceparent: span?.traceparent,
      }),
      body,
      abort: deadline,
      onSent,
      fresh,
    });
  }

  async #prefillAt(
    visit: Visit,
    part: Part,
    kvRequest: string,
    fresh: boolean,
    readTokens: number | undefined,
  ): Promise<PrefillOutcome> {
    const { clock } = this.ambient;
    const { kvSources } = this.fleet;
    const { prefillAnswerLengthBytes: limitBytes } = this.settings.limits;
    const { deadline, record, request } = part;
    const { instance } = visit;
    const { inFlight } = instance;
    const source = kvSources?.sourceFor(instance, part, part.kvHolders ?? []);
    const named = source && kvSources?.kvTransferParam(source);
    const body = prefillBody(request, kvRequest, part.requestId, named);
    const startedAtMs = clock.now();
    let sentAtMs: number | undefined;
    const onSent = () => {
      sentAtMs ??= clock.now();
    };
    record.prefillStartedAtMs = startedAtMs;
    const span = this.#begin(part, instance);
    const { charactersPerToken } = this.fleet.prefillCosts;
    const expected = this.prefillers.cachedTokens(instance, part, charactersPerToken);
    record.expectedCachedTokens = expected;
    record.kvSource = source?.peer;
    record.kvSourceTokens = source?.tokens;
    try {
      const answer = await this.send(part, instance, {
        path: request.endpoint,
        body,
        span,
        // A leg that reads a turn is not tried again.
        fresh: fresh || readTokens !== undefined,
        onSent,
      });
      const { bytes, complete } =
        answer.body.readBuffered(limitBytes) ?? (await answer.body.readLimited(limitBytes));
      if (!complete) {
        answer.discard();
        throw tooLong(instance, `${limitBytes} bytes`);
      }
      const nowMs = clock.now();
      const durationMs = nowMs - startedAtMs;
      record.prefillMs = durationMs;
      const outcome = readPrefillAnswer(visit, answer, bytes, nowMs);
      span?.set({ "http.response.status_code": answer.status });
      if (outcome.kind === "kv") {
        const { usage, kv_transfer_params: params } = outcome.fields;
        const ended = {
          request,
          usage,
          durationMs,
          wasAlone: inFlight === 1,
          cachedTokens: cachedTokensOf(outcome.fields),
          readTokens,
          fetchTokens: source && source.tokens - source.ownTokens,
        };
        record.cachedTokens = this.fleet.signals.prefillEnded(ended, expected);
        kvSources?.askedFor(request);
        span?.set({ "kv.cached_tokens": record.cachedTokens });
        if ((params as KvTransferParams)["first_token_ids"] != null)
          span?.set({ "kv.first_token": "prefill" });
      }
      span?.end();
      if (outcome.status === 200) part.onPrefilled?.(instance);
      return outcome;
    } catch (error) {
      span?.end(deadline.reasonOr(error));
      throw error;
    } finally {
      // An instance divides its time among its requests.
      const shared = Math.max(1, (inFlight + instance.inFlight) / 2);
      if (sentAtMs !== undefined) record.prefillWorkMs += (clock.now() - sentAtMs) / shared;
    }
  }

  async #generate(
    part: Part,
    role: Role,
    onePart: boolean,
    kv?: DecodeLegKv,
  ): Promise<LegEnd<LegAnswer>> {
    if (part.isSplit === true) await this.fleet.partTurn();
    const { request, requestId, record } = part;
    const body =
      kv === undefined ? singleInstanceBody(request) : decodeBody(request, kv.params, requestId);
    const traits = { onePart, kvFromPrefill: kv !== undefined };
    const { leaseEndsAtMs = Number.POSITIVE_INFINITY, held } = kv ?? {};
    record[`${role}StartedAtMs`] = this.ambient.clock.now();
    return this.#try(
      part,
      {
        role,
        phase: `the ${role} leg's first byte`,
        limitMs: this.settings.timeouts.firstByteMs,
        partner: kv?.prefill,
        once: kv !== undefined,
      },
      async (visit, { fresh }) => {
        if (this.ambient.clock.now() >= leaseEndsAtMs) throw leaseExpired(requestId);
        const leg = { path: request.endpoint, body, fresh, onSent: held?.sent };
        const read = await this.#answerAt(
          visit,
          part,
          leg,
          (own, answer) =>
            readLegAnswer(request, own, answer, traits, this.settings.limits.heldAnswerLengthBytes),
          held,
        );
        return part.readAnswer?.(read) ?? read;
      },
    );
  }

  /** A leg whose answer passes on; `read` checks its start. */
  async #answerAt(
    visit: Visit,
    requester: Requester,
    leg: SentLeg,
    read: (visit: Visit, answer: UpstreamAnswer) => Promise<LegAnswer>,
    held?: HeldBlocks,
  ): Promise<LegAnswer> {
    const { instance } = visit;
    const { record, deadline } = requester;
    const span = this.#begin(requester, instance);
    let answer: UpstreamAnswer | undefined;
    try {
      answer = await this.send(requester, instance, { ...leg, span });
      const { status } = answer;
      const begun = await read(span === undefined ? visit : withSpan(visit, span), answer);
      if (begun.status !== 200) held?.answered(status);
      const firstByteMs = this.ambient.clock.now() - (record[`${instance.role}StartedAtMs`] ?? 0);
      if (instance.role === "decode") {
        record.firstByteMs = firstByteMs;
        record.streamed = isEventStream(answer);
      } else record.prefillMs = firstByteMs;
      span?.set({ "http.response.status_code": status, "kv.first_byte_ms": firstByteMs });
      return begun;
    } catch (error) {
      held?.failed(answer?.status, error);
      answer?.discard();
      span?.end(deadline.reasonOr(error));
      throw error;
    }
  }

  #begin(requester: Requester, instance: Instance): Span | undefined {
    requester.record[instance.role] = instance.url;
    const { tracer } = this.ambient;
    return tracer === undefined ? undefined : startLegSpan(tracer, requester, instance);
  }

  /**
   * Tries instances until one has no fault or no try is left. The last try decides.
   * @throws The deadline's reason.
   */
  async #try<T extends LegValue>(
    requester: Requester & RoutingContext,
    { role, phase, limitMs, partner, only, once = only !== undefined }: TryOptions,
    leg: (visit: Visit, tries: Tries) => Promise<T>,
  ): Promise<LegEnd<T>> {
    const { deadline, requestId } = requester;
    const pool = this.fleet.pools[role];
    const tries = requester.attempts[role];
    const without = new Set<Instance>();
    const lacking: Instance[] = [];
    let end: LegEnd<T> | undefined;
    deadline.startPhase(phase, limitMs);
    try {
      for (;;) {
        const next = only ?? nextVisit(pool, requester, tries, without, partner);
        const visit = only !== undefined && end !== undefined ? undefined : next;
        if (visit === undefined) return end ?? { error: noInstance(pool, partner, requester) };
        end?.value?.discard?.();
        end = await this.#tryAt(visit, requester, tries, leg);
        const { instance } = visit;
        const { fault, error } = end;
        if (fault === undefined) {
          if (error === undefined) {
            tries.answered();
            if (lacking.length > 0) {
              this.missing ??= new MissingModels(this.ambient.clock);
              this.missing.add(requester.request?.fields.model, lacking);
            }
          }
          return end;
        }
        const isUnseen = fault === "unreachable" || fault === "lacks-model";
        if (isUnseen) without.add(instance);
        if (fault === "lacks-model") lacking.push(instance);
        const all = (role === "prefill" ? requester.prefillers : undefined) ?? pool.list();
        const again =
          isUnseen || (!once && (await tries.again(fault, all, deadline, this.ambient.clock)));
        const failure = error ?? badStatus(instance, end.value?.status ?? 0);
        this.ambient.log.warn("leg-failed", {
          requestId,
          role,
          instance: instanceName(instance),
          again,
          error: failure,
        });
        if (!again) return end;
      }
    } finally {
      deadline.endPhase();
    }
  }

  /** Ends the visit on a fault or an error. */
  async #tryAt<T extends LegValue>(
    visit: Visit,
    { deadline }: Requester,
    tries: Tries,
    leg: (visit: Visit, tries: Tries) => Promise<T>,
  ): Promise<LegEnd<T>> {
    const { instance } = visit;
    const { role } = instance;
    try {
      const value = await leg(visit, tries);
      let fault = faultOfStatus(value.status);
      // If no other instance exists, the client's model does not exist.
      if (fault === "lacks-model" && this.fleet.pools[role].list().length === 1) fault = undefined;
      if (fault !== undefined)
        tries.blame(value.visit ?? visit, fault, badStatus(instance, value.status));
      else if (value.visit === undefined) visit.succeeded();
      return { fault, value };
    } catch (thrown) {
      if (deadline.aborted) {
        visit.abandoned();
        throw deadline.reason;
      }
      const error = KvError.from(thrown, "KV_INTERNAL", `the ${role} leg failed`);
      const fault = faultOf(error);
      if (fault === undefined) visit.abandoned();
      else tries.blame(visit, fault, error);
      return { fault, error };
    }
  }
}

function nextVisit(
  pool: InstancePool,
  context: RoutingContext,
  { avoided, tried }: Tries,
  without: ReadonlySet<Instance>,
  partner: Partner | undefined,
): Visit | undefined {
  for (const others of [avoided, tried]) {
    if (others.size === 0) continue;
    const visit = pool.visit(context, new Set([...without, ...others]), partner);
    if (visit !== undefined) return visit;
  }
  return pool.visit(context, without, partner);
}

function startLegSpan(
  tracer: Tracer,
  { headers, requestId, record }: Requester,
  { role, url }: Instance,
): Span | undefined {
  const span = tracer.start(`kv_proxy.${role}`, {
    kind: "client",
    parent: traceparentOf(headers),
    attributes: { "kv.request_id": requestId, "server.address": url },
  });
  const { disaggregation, readback, readbackTokens } = record;
  if (readback !== undefined)
    span?.set({ "kv.readback": readback, "kv.readback_tokens": readbackTokens ?? 0 });
  if (disaggregation !== undefined) span?.set(disaggregationAttributes(disaggregation));
  return span;
}

function disaggregationAttributes({
  inputs,
  reason,
}: Disaggregation): Record<string, string | number> {
  const attributes: Record<string, string | number> = {
    "kv.disaggregation.reason": reason,
  };
  for (const [name, value] of Object.entries(inputs)) {
    const snake = name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
    if (value !== undefined) attributes[`kv.disaggregation.${snake}`] = value;
  }
  return attributes;
}

/** The visit's end, at the answer's last byte, also ends the span. */
function withSpan(visit: Visit, span: Span): Visit {
  let isOpen = true;
  const end = (error?: KvError) => {
    if (isOpen) span.end(error);
    isOpen = false;
  };
  return {
    instance: visit.instance,
    succeeded() {
      visit.succeeded();
      end();
    },
    abandoned() {
      visit.abandoned();
      end();
    },
    failed(error) {
      visit.failed(error);
      end(error);
    },
  };
}
