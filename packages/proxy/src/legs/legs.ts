import {
  failureStage,
  type Instance,
  type InstancePool,
  instanceName,
  type Partner,
  type Role,
  type RoutingContext,
  type Visit,
} from "@kv/fleet";
import type {
  Deadline,
  Fleet,
  ForwardedHeaders,
  RequestBody,
  UpstreamAnswer,
} from "@kv/fleet/front-end";
import { forwardedHeaders, legHeaders } from "@kv/fleet/front-end";
import { type Ambient, KvError, type KvTransferParams, type Log, type Span } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { decodeBody, prefillBody, singleInstanceBody } from "../request/leg-bodies.js";
import {
  cachedTokensOf,
  endedVisit,
  isEventStream,
  type LegAnswer,
  type PrefillOutcome,
  readLegAnswer,
  readPrefillAnswer,
  requireReadable,
} from "../response/leg-answer.js";
import {
  badAnswer,
  badStatus,
  hadKeptConnection,
  isModelMissing,
  isServerFailure,
  leaseExpired,
  MODEL_MISSING,
  noInstance,
} from "../upstream/upstream-errors.js";
import type {
  Attempts,
  DecodeLegOptions,
  Part,
  PrefillLegOptions,
  SingleLeg,
} from "./client-request.js";
import { startLegSpan, withSpan } from "./leg-spans.js";
import { MissingModels } from "./missing-models.js";

/**
 * An answer that the client gets where no other instance gives a better one, and the instances that
 * lack the model.
 */
interface ServerFailure<T> {
  answer: T | undefined;
  readonly lacking: Instance[];
}

interface GenerationLeg extends DecodeLegOptions {
  readonly role: Role;
  readonly body: RequestBody;
  /**
   * The request goes to one instance unsplit. It may have several choices, and a failure is tried
   * on one more instance.
   */
  readonly whole?: boolean | undefined;
  /** P computed the prompt. */
  readonly kvFromPrefill?: boolean | undefined;
  /** No other instance holds anything for the leg, so a failure is tried on one more instance. */
  readonly alone?: boolean | undefined;
}

/**
 * Runs single legs at the instances of both roles: retries, time limits, checks of the answer,
 * records and spans.
 */
export class Legs {
  readonly prefillers: InstancePool;
  readonly decoders: InstancePool;
  readonly settings: ProxySettings;
  readonly ambient: Ambient;
  /** The clients' headers that instances of each role get. */
  readonly forwarded: ForwardedHeaders;
  readonly fleet: Fleet;
  readonly #background = new Set<Promise<void>>();
  #missing: MissingModels | undefined = undefined;

  constructor(fleet: Fleet, settings: ProxySettings) {
    this.fleet = fleet;
    this.prefillers = fleet.pools.prefill;
    this.decoders = fleet.pools.decode;
    this.ambient = fleet.ambient;
    this.settings = settings;
    this.forwarded = forwardedHeaders(settings.forwardHeaders);
  }

  /**
   * Sends the prompt to a prefill instance. `kvRequest` (JSON text) makes it keep the KV.
   * @throws `KV_PROXY_UPSTREAM_FAILED`, `KV_PROXY_NO_INSTANCE`, the deadline's reason.
   */
  async prefill(
    part: Part,
    kvRequest: string,
    { only, readTokens, limitMs = this.settings.timeouts.prefillMs }: PrefillLegOptions = {},
  ): Promise<PrefillOutcome> {
    const { clock, log } = this.ambient;
    const { prefillAnswerLengthBytes: limitBytes } = this.settings.limits;
    const { deadline, record, attempts } = part;
    if (part.isSplit === true) await this.fleet.partTurn();
    const body = prefillBody(part.request, kvRequest, part.requestId);
    const leg = async (
      visit: Visit,
      failed: ServerFailure<PrefillOutcome>,
    ): Promise<PrefillOutcome> => {
      const { instance } = visit;
      const { url, inFlight } = instance;
      const startedAtMs = clock.now();
      let sentAtMs: number | undefined;
      const onSent = () => {
        sentAtMs ??= clock.now();
      };
      record.prefill = url;
      record.prefillStartedAtMs = startedAtMs;
      const span = startLegSpan(this.ambient.tracer, part, instance);
      const { charactersPerToken } = this.fleet.prefillCosts;
      const expected = this.prefillers.cachedTokens(instance, part, charactersPerToken);
      record.expectedCachedTokens = expected;
      try {
        const answer = await this.#send(part, instance, span, body, onSent);
        requireReadable(instance.role, instance.url, answer);
        const { bytes, complete } =
          answer.body.readBuffered(limitBytes) ?? (await answer.body.readLimited(limitBytes));
        if (!complete) {
          answer.discard();
          throw badAnswer("prefill", url, `answered with more than ${limitBytes} bytes`);
        }
        const nowMs = clock.now();
        record.prefillMs = nowMs - startedAtMs;
        const outcome = readPrefillAnswer(instance, answer, bytes, nowMs);
        const lacksModel =
          only === undefined && this.#lacksModel(visit, answer.status, failed.lacking);
        if (outcome.kind === "error" && (lacksModel || isServerFailure(answer.status))) {
          failed.answer = outcome;
          throw badStatus("prefill", url, answer.status);
        }
        visit.succeeded();
        if (outcome.kind === "kv") {
          const { usage } = outcome.fields;
          const ended = {
            request: part.request,
            usage,
            durationMs: record.prefillMs,
            wasAlone: inFlight === 1,
            cachedTokens: cachedTokensOf(outcome.fields),
            readTokens,
          };
          record.cachedTokens = this.fleet.signals.prefillEnded(ended, expected);
          span?.set({ "kv.cached_tokens": record.cachedTokens });
          const params = outcome.fields.kv_transfer_params as KvTransferParams | null | undefined;
          if (params?.["first_token_ids"] != null) span?.set({ "kv.first_token": "prefill" });
        }
        part.onPrefilled?.(instance);
        span?.set({ "http.response.status_code": answer.status });
        span?.end();
        return outcome;
      } catch (error) {
        span?.end(deadline.reasonOr(error));
        throw error;
      } finally {
        // An instance divides its time among the requests that it has.
        const shared = Math.max(1, (inFlight + instance.inFlight) / 2);
        if (sentAtMs !== undefined) record.prefillWorkMs += (clock.now() - sentAtMs) / shared;
      }
    };

    const { prefillRetries: retries, failedPrefill: avoid, failedDecode: avoiding } = attempts;
    return this.#try(
      { phase: "the prefill leg", limitMs },
      {
        pool: this.prefillers,
        context: part,
        deadline,
        retries,
        avoid,
        partner: { avoiding },
        only,
        log,
      },
      leg,
    );
  }

  /**
   * Sends a part to a decode instance, with the KV parameters (JSON text) that the prefill worker
   * answered. The caller ends the visit of the answer.
   * @throws `KV_PROXY_UPSTREAM_FAILED`, `KV_PROXY_NO_INSTANCE`, `KV_LEASE_EXPIRED`, the deadline's
   * reason.
   */
  async decode(
    part: Part,
    kvTransferParams: string,
    options?: DecodeLegOptions,
  ): Promise<LegAnswer> {
    if (part.isSplit === true) await this.fleet.partTurn();
    return this.#generate(part, {
      role: "decode",
      body: decodeBody(part.request, kvTransferParams, part.requestId),
      kvFromPrefill: true,
      ...options,
    });
  }

  /**
   * Has one instance compute the prompt of a part and generate.
   *
   * `why`: `no-kv`: the prefill worker has kept none. `unsplittable`: the request goes there as it
   * is. `one-leg-pays`: a prefill leg would not. `unnamed`: to a sidecar, it names no prefill
   * instance. `prompt-only`: it concerns the prompt, so a prefill instance's answer is the
   * client's. `reason` is logged.
   * @throws As `decode`.
   */
  async single(part: Part, why: SingleLeg, reason?: string): Promise<LegAnswer> {
    if (part.isSplit === true) await this.fleet.partTurn();
    const { log, metrics } = this.ambient;
    if (why === "no-kv" || why === "unsplittable") {
      log.warn("decode-computes", { requestId: part.requestId, reason });
      metrics.count("kv_proxy_decode_alone_total");
    } else if (why === "unnamed")
      metrics.count("kv_proxy_disaggregation_total", 1, { legs: "1", reason: "no-prefiller" });
    const whole = why !== "no-kv" && why !== "one-leg-pays";
    const role = why === "prompt-only" ? "prefill" : "decode";
    const body = singleInstanceBody(part.request);
    return this.#generate(part, { role, body, whole, alone: why !== "no-kv" });
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

  #generate(
    part: Part,
    {
      role,
      body,
      leaseEndsAtMs = Number.POSITIVE_INFINITY,
      use,
      prefill,
      whole = false,
      kvFromPrefill = false,
      alone = whole,
    }: GenerationLeg,
  ): Promise<LegAnswer> {
    const { clock, log } = this.ambient;
    const { limits, timeouts } = this.settings;
    const { request, requestId, deadline, record, attempts } = part;
    const decoding = role === "decode";
    const startedAtMs = clock.now();
    record[`${role}StartedAtMs`] = startedAtMs;
    const leg = async (visit: Visit, failed: ServerFailure<LegAnswer>): Promise<LegAnswer> => {
      const { instance } = visit;
      if (clock.now() >= leaseEndsAtMs) throw leaseExpired(requestId);
      record[role] = instance.url;
      const span = startLegSpan(this.ambient.tracer, part, instance);
      let answer: UpstreamAnswer | undefined;
      try {
        answer = await this.#send(part, instance, span, body, use?.sent);
        requireReadable(instance.role, instance.url, answer);
        const read = await readLegAnswer(
          request,
          withSpan(visit, span),
          answer,
          { onePart: !whole, kvFromPrefill },
          limits.heldAnswerLengthBytes,
        );
        if (read.status !== 200) use?.refused(answer.status);
        const legAnswer = part.readAnswer?.(read) ?? read;
        const firstByteMs = clock.now() - startedAtMs;
        if (decoding) {
          record.firstByteMs = firstByteMs;
          record.streamed = isEventStream(answer);
        } else record.prefillMs = firstByteMs;
        span?.set({ "http.response.status_code": answer.status, "kv.first_byte_ms": firstByteMs });
        const lacksModel = this.#lacksModel(visit, legAnswer.status, failed.lacking);
        const isFailure = lacksModel || (alone && isServerFailure(legAnswer.status));
        if (!isFailure || legAnswer.rest !== undefined) return legAnswer;
        failed.answer = { ...legAnswer, visit: endedVisit(instance) };
        throw badStatus(role, instance.url, legAnswer.status);
      } catch (error) {
        if (answer !== undefined) use?.failed(answer.status, error);
        answer?.discard();
        if (decoding && !deadline.aborted) attempts.failedDecode.add(instance);
        span?.end(deadline.reasonOr(error));
        throw error;
      }
    };

    const pool = decoding ? this.decoders : this.prefillers;
    const avoid = decoding ? attempts.failedDecode : undefined;
    return this.#try(
      { phase: `the ${role} leg's first byte`, limitMs: timeouts.firstByteMs },
      { pool, context: part, deadline, retries: alone ? 1 : 0, avoid, partner: prefill, log },
      leg,
    );
  }

  /**
   * As `tryInstances`, in a phase of the deadline. Where no other instance gave a better answer
   * than a server failure, the client gets that.
   */
  async #try<T>(
    { phase, limitMs }: { readonly phase: string; readonly limitMs: number },
    options: TryOptions,
    leg: (visit: Visit, failed: ServerFailure<T>) => Promise<T>,
  ): Promise<T> {
    const failed: ServerFailure<T> = { answer: undefined, lacking: [] };
    options.deadline.startPhase(phase, limitMs);
    try {
      const result = await tryInstances(options, (visit) => leg(visit, failed));
      if (failed.lacking.length > 0) {
        this.#missing ??= new MissingModels(this.ambient.clock);
        this.#missing.add(options.context.request?.fields.model, failed.lacking);
      }
      return result;
    } catch (error) {
      if (failed.answer !== undefined && failureStage(error) === "status") return failed.answer;
      throw error;
    } finally {
      options.deadline.endPhase();
    }
  }

  /** Of a part for which nothing was tried yet. Instances that lack its model are avoided. */
  newAttempts({ fields }: Part["request"]): Attempts {
    return newAttempts(this.#missing?.lacking(fields.model));
  }

  /**
   * Whether the instance does not have the model, and another one may. That is no failure of it.
   */
  #lacksModel(visit: Visit, status: number, lacking: Instance[]): boolean {
    if (status !== MODEL_MISSING || this.fleet.pools[visit.instance.role].list().length === 1)
      return false;
    lacking.push(visit.instance);
    visit.succeeded();
    return true;
  }

  #send(
    part: Part,
    instance: Instance,
    span: Span | undefined,
    body: RequestBody,
    onSent?: () => void,
  ): Promise<UpstreamAnswer> {
    return this.fleet.upstream.send({
      role: instance.role,
      url: instance.url,
      method: "POST",
      path: part.request.endpoint,
      headers: legHeaders({
        clientHeaders: part.headers,
        forwarded: this.forwarded[instance.role],
        requestId: part.requestId,
        instance,
        traceparent: span?.traceparent,
      }),
      body,
      abort: part.deadline,
      onSent,
    });
  }
}

const NONE: ReadonlySet<Instance> = new Set();

/** Of a part for which nothing was tried yet, with instances to avoid. */
export function newAttempts(avoid: ReadonlySet<Instance> = NONE): Attempts {
  return { failedDecode: new Set(avoid), failedPrefill: avoid, prefillRetries: 1, restarts: 1 };
}

export interface TryOptions {
  readonly pool: InstancePool;
  /** The request that instances are chosen for. */
  readonly context: RoutingContext;
  readonly deadline: Deadline;
  /** How often another instance is tried after a failure at which the request had left. */
  readonly retries: number;
  readonly log: Log;
  /** Instances that are chosen only when there is no other. */
  readonly avoid?: ReadonlySet<Instance> | undefined;
  /** Only instances that are its pair are chosen. */
  readonly partner?: Partner | undefined;
  /** Visits this instance and no other. */
  readonly only?: Visit | undefined;
}

/**
 * Runs a leg at one instance after another until it succeeds or may not be tried again. `leg` ends
 * its visit when it succeeds; when it throws, the visit is ended here.
 * @throws That of the last attempt, the deadline's reason, `KV_PROXY_NO_INSTANCE`.
 */
export async function tryInstances<T>(
  options: TryOptions,
  leg: (visit: Visit) => Promise<T>,
): Promise<T> {
  const { pool, deadline } = options;
  let tried = NONE;
  let failuresAfterSending = 0;
  let lastError: unknown;
  for (;;) {
    const visit = nextVisit(options, tried);
    if (visit === undefined) throw lastError ?? noInstance(pool, options.partner, options.context);
    try {
      return await leg(visit);
    } catch (error) {
      if (deadline.aborted) {
        visit.abandoned();
        throw deadline.reason;
      }
      lastError = error;
      // With a kept connection, the instance itself may be well.
      if (!hadKeptConnection(error)) tried = new Set([...tried, visit.instance]);
      visit.failed(KvError.from(error, "KV_INTERNAL", `the ${pool.role} leg failed`));
      const stage = failureStage(error);
      // Its engine has received nothing.
      const isUntaken = stage === "connect" || isModelMissing(error);
      if (!isUntaken) failuresAfterSending += 1;
      const again = isUntaken || (stage !== undefined && failuresAfterSending <= options.retries);
      const { requestId } = options.context;
      const at = { requestId, role: pool.role, instance: instanceName(visit.instance) };
      options.log.warn("leg-failed", { ...at, again, error });
      if (!again) throw error;
    }
  }
}

function nextVisit(
  { pool, context, avoid, only, partner }: TryOptions,
  tried: ReadonlySet<Instance>,
): Visit | undefined {
  if (only !== undefined) return tried.has(only.instance) ? undefined : only;
  const preferred =
    avoid === undefined || avoid.size === 0
      ? undefined
      : pool.visit(context, new Set([...tried, ...avoid]), partner);
  return preferred ?? pool.visit(context, tried, partner);
}
