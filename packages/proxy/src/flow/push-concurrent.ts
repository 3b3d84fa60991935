import { failureStage, type Instance, type Role, type Visit } from "@kv/fleet";
import type { Deadline } from "@kv/fleet/front-end";
import { KvError, type Timer } from "@kv/interface";
import { type Attempts, type Part, underUniqueId } from "../legs/client-request.js";
import type { Legs } from "../legs/legs.js";
import { releaseUntaken } from "../legs/release-blocks.js";
import { KV_REQUEST_PUSH } from "../request/leg-bodies.js";
import {
  cachedTokensOf,
  KvUse,
  type LegAnswer,
  type PrefillOutcome,
  withPromptAnswer,
} from "../response/leg-answer.js";
import { MODEL_MISSING, requireAnyInstance } from "../upstream/upstream-errors.js";
import type { DisaggregationStrategy } from "./disaggregation-strategy.js";
import {
  type EngineCoordinates,
  failureMaybeOfKv,
  mayRestart,
  type PrefillEngines,
  refusesOwnLimit,
  requireDecodeAlone,
  serverFailureWithAlternative,
} from "./pull-strategy.js";
import type { PushSequentialStrategy } from "./push-sequential.js";

/**
 * Both legs at once: the prefill worker WRITEs the KV into the decode worker (vLLM's
 * NixlPushConnector), and the decode leg carries the coordinates of the prefill engine. The legs
 * are sequential while the coordinates of the chosen instance are not known, and after a failure
 * before anything has left for the client.
 */
export class PushConcurrentStrategy implements DisaggregationStrategy {
  readonly name = "push";
  readonly #legs: Legs;
  readonly #engines: PrefillEngines;
  readonly #sequential: PushSequentialStrategy;

  constructor(legs: Legs, engines: PrefillEngines, sequential: PushSequentialStrategy) {
    this.#legs = legs;
    this.#engines = engines;
    this.#sequential = sequential;
  }

  async run(part: Part): Promise<LegAnswer> {
    requireAnyInstance(this.#legs.decoders);
    const { prefillers, fleet } = this.#legs;
    const partner = { avoiding: part.attempts.failedDecode };
    let instance = prefillers.choose(part, new Set(), partner);
    const reading = instance === undefined ? undefined : fleet.pairing?.certain(instance);
    if (reading !== undefined) {
      await reading;
      instance = prefillers.choose(part, new Set(), partner);
    }
    if (instance === undefined) return this.#sequential.run(part);
    const coordinates = this.#engines.coordinatesOf(instance);
    // The coordinates are learned from this instance's answer, so no other instance may take its
    // place.
    if (coordinates === undefined)
      return this.#sequential.run({ ...part, preferredPrefill: instance });
    const own = underUniqueId(part, this.#legs.ambient.random);
    const legs = new ConcurrentLegs(this.#legs, this.#engines, own, instance.begin(), coordinates);
    const result = await legs.run();
    return "why" in result ? this.#restart(part, result) : result;
  }

  /** Begins again with sequential legs, under an id that is new to both engines. */
  #restart(part: Part, { why, failedPrefill, usedRetryOf }: Restart): Promise<LegAnswer> {
    const { record, attempts } = part;
    const { log, metrics } = this.#legs.ambient;
    const { prefill, decode } = record;
    log.warn("push-began-again", { requestId: part.requestId, prefill, decode, why });
    metrics.count("kv_proxy_restarts_total");
    record.restarted();
    if (failedPrefill !== undefined) attempts.failedPrefill = new Set([failedPrefill]);
    if (usedRetryOf === "prefill") attempts.prefillRetries = 0;
    if (usedRetryOf === "decode") attempts.restarts = 0;
    return this.#sequential.run(part);
  }
}

/** The part is to begin again; nothing has left for the client. */
interface Restart {
  readonly why: string;
  /** The prefill instance that failed, which the next try avoids. */
  readonly failedPrefill?: Instance | undefined;
  /** The role whose only retry this restart is. */
  readonly usedRetryOf?: Role | undefined;
}

/** An answer waits no longer for P's number of cached tokens. */
const CACHED_TOKENS_MS = 1000;

/** How the prefill leg ended. */
interface PrefillEnd {
  readonly outcome?: PrefillOutcome | undefined;
  readonly error?: unknown;
}

/** How the decode leg ended. */
interface DecodeEnd {
  readonly answer?: LegAnswer | undefined;
  readonly error?: unknown;
}

/** The two legs of one part that are under way at once. */
class ConcurrentLegs {
  readonly #legs: Legs;
  readonly #part: Part;
  readonly #prefillInstance: Instance;
  readonly #coordinates: EngineCoordinates;
  readonly #prefillDeadline: Deadline;
  readonly #decodeDeadline: Deadline;
  readonly #use = new KvUse();
  #learned: EngineCoordinates | undefined = undefined;
  readonly #prefilling: Promise<PrefillEnd>;
  readonly #decoding: Promise<DecodeEnd>;

  /**
   * Sends both legs: the prefill leg to the instance of `visit`, whose `coordinates` the decode leg
   * carries.
   */
  constructor(
    legs: Legs,
    engines: PrefillEngines,
    part: Part,
    visit: Visit,
    coordinates: EngineCoordinates,
  ) {
    this.#legs = legs;
    this.#part = part;
    this.#prefillInstance = visit.instance;
    this.#coordinates = coordinates;
    this.#prefillDeadline = part.deadline.fork();
    this.#decodeDeadline = part.deadline.fork();
    this.#prefilling = legs
      .prefill({ ...part, deadline: this.#prefillDeadline }, KV_REQUEST_PUSH, { only: visit })
      .then(
        (outcome) => {
          if (outcome.kind === "kv") {
            this.#learned = engines.learn(outcome);
            void engines.confirm(outcome.instance);
          }
          return { outcome };
        },
        (error: unknown) => ({ error }),
      );
    this.#decoding = legs
      .decode(
        { ...part, deadline: this.#decodeDeadline },
        registrationParams(coordinates, part.requestId),
        {
          prefill: visit.instance,
          use: this.#use,
        },
      )
      .then(
        (answer) => ({ answer }),
        (error: unknown) => ({ error }),
      );
  }

  /**
   * The decode leg's answer, the prefill leg's error answer, or a restart.
   * @throws The errors of the legs, the deadline's reason.
   */
  async run(): Promise<LegAnswer | Restart> {
    try {
      return await this.#firstEnded();
    } finally {
      // A leg that is not needed any more ends by itself, or with the client.
      this.#legs.inBackground(this.#bothEnded());
    }
  }

  /** Has the KV released that P has brought and D has not taken. */
  async #bothEnded(): Promise<void> {
    const [{ outcome }] = await Promise.all([this.#prefilling, this.#decoding]);
    if (outcome?.kind !== "kv") return;
    // D's parameters name the engine before.
    const use = this.#isOtherEngine ? new KvUse() : this.#use;
    if (!use.isTaken) releaseUntaken(this.#legs, this.#part, outcome, use);
  }

  async #firstEnded(): Promise<LegAnswer | Restart> {
    // A prefill leg that has brought KV leaves the decision to the decode leg. Each race has a
    // promise of its own: a shared one that never settles would keep all races, with their answers,
    // in memory.
    const prefillFailed = this.#prefilling.then((end): PrefillEnd | Promise<never> =>
      end.outcome?.kind === "kv" ? new Promise(() => {}) : end,
    );
    const first = await Promise.race([
      this.#decoding.then((decode) => ({ decode })),
      prefillFailed.then((prefill) => ({ prefill })),
    ]);
    if ("prefill" in first) return this.#afterPrefill(first.prefill);
    const { answer, error } = first.decode;
    if (answer === undefined) return this.#afterDecodeFailure(error);
    if (answer.status === 200 && this.#part.request.promptFields === "none")
      return { ...answer, cachedTokens: () => this.#cachedTokens() };
    return (await this.#afterServerFailure(answer)) ?? this.#afterPrefill(await this.#prefilling);
  }

  async #afterDecodeFailure(error: unknown): Promise<Restart> {
    await this.#abortPrefill();
    const { deadline, attempts } = this.#part;
    if (deadline.aborted || !mayRestart(attempts, error)) throw error;
    return { why: "the decode leg broke off", usedRetryOf: "decode" };
  }

  /**
   * A restart where another decode instance, or the KV of another prefill instance, may do better
   * than this server failure; else undefined.
   */
  async #afterServerFailure(answer: LegAnswer): Promise<Restart | undefined> {
    const { attempts } = this.#part;
    const alternative = serverFailureWithAlternative(this.#legs.decoders, answer);
    const failure = alternative ?? failureMaybeOfKv(answer);
    if (failure === undefined || !mayRestart(attempts, failure)) return undefined;
    answer.discard();
    answer.visit.failed(failure);
    attempts.failedDecode.add(answer.visit.instance);
    await this.#abortPrefill();
    this.#throwIfAborted();
    const failedPrefill = alternative === undefined ? this.#prefillInstance : undefined;
    return { why: "the decode leg failed", failedPrefill, usedRetryOf: "decode" };
  }

  /** The prefill leg has ended; the decode leg may not have. */
  async #afterPrefill({ outcome, error }: PrefillEnd): Promise<LegAnswer | Restart> {
    const { request, attempts, deadline } = this.#part;
    const instance = this.#prefillInstance;
    if (this.#isOtherEngine) {
      const why = "the prefill engine was restarted";
      await this.#abortDecode(why);
      this.#throwIfAborted();
      return { why };
    }
    if (outcome?.kind === "kv") {
      const decode = await this.#decoding;
      if (decode.answer === undefined) throw decode.error;
      const answer = { ...decode.answer, cachedTokens: () => this.#cachedTokens() };
      return withPromptAnswer(answer, request, outcome);
    }
    if (outcome === undefined) {
      const why = "the prefill leg failed";
      await this.#abortDecode(why);
      this.#throwIfAborted();
      if (!mayRetryPrefill(attempts, error)) throw error;
      const usedRetryOf = failureStage(error) === "connect" ? undefined : "prefill";
      return { why, failedPrefill: instance, usedRetryOf };
    }
    await this.#abortDecode("the prefill worker keeps no KV for it");
    if (outcome.kind === "no-kv") {
      requireDecodeAlone(this.#legs, outcome);
      return { why: `${instance.url} answered without kv_transfer_params` };
    }
    if (refusesOwnLimit(this.#part, outcome))
      return { why: `${instance.url} refused the limit of its leg` };
    const { status } = outcome.answer;
    if (status === MODEL_MISSING && this.#legs.prefillers.list().length > 1)
      return { why: `${instance.url} does not have the model`, failedPrefill: instance };
    const failure = serverFailureWithAlternative(this.#legs.prefillers, outcome.answer);
    if (failure === undefined || !mayRetryPrefill(attempts, failure) || deadline.aborted)
      return outcome.answer;
    return { why: "the prefill leg failed", failedPrefill: instance, usedRetryOf: "prefill" };
  }

  /** The prefill instance has answered with another engine than the decode leg has. */
  get #isOtherEngine(): boolean {
    return this.#learned !== undefined && this.#learned.engineId !== this.#coordinates.engineId;
  }

  /**
   * How many tokens of the prompt P had cached, once P has answered. D has its KV, so that takes no
   * long time.
   */
  async #cachedTokens(): Promise<number | undefined> {
    const { clock } = this.#legs.ambient;
    let timer: Timer | undefined;
    const late = new Promise<PrefillEnd>((resolve) => {
      timer = clock.setTimer(() => resolve({}), CACHED_TOKENS_MS);
    });
    const { outcome } = await Promise.race([this.#prefilling, late]);
    timer?.cancel();
    return outcome?.kind === "kv" ? cachedTokensOf(outcome.fields) : undefined;
  }

  async #abortPrefill(): Promise<void> {
    this.#prefillDeadline.abort(new KvError("KV_REQUEST_ABORTED", "the decode leg failed"));
    await this.#prefilling;
  }

  async #abortDecode(why: string): Promise<void> {
    this.#decodeDeadline.abort(new KvError("KV_REQUEST_ABORTED", why));
    const { answer } = await this.#decoding;
    answer?.discard();
    answer?.visit.abandoned();
  }

  #throwIfAborted(): void {
    const { deadline } = this.#part;
    if (deadline.aborted) throw deadline.reason;
  }
}

/**
 * JSON text of the `kv_transfer_params` for a decode leg that is sent together with the prefill leg
 * (vLLM 0.33, push). It has no blocks yet.
 */
function registrationParams(
  { engineId, host, port, tpSize, ppSize, dcpSize }: EngineCoordinates,
  requestId: string,
): string {
  return JSON.stringify({
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_engine_id: engineId,
    remote_request_id: requestId,
    remote_host: host,
    remote_port: port,
    tp_size: tpSize,
    pp_size: ppSize > 1 ? ppSize : undefined,
    dcp_size: dcpSize > 1 ? dcpSize : undefined,
    transfer_mode: "push",
  });
}

/** Whether a prefill leg may be tried again after this failure. */
function mayRetryPrefill({ prefillRetries }: Attempts, error: unknown): boolean {
  const stage = failureStage(error);
  return stage === "connect" || (stage !== undefined && prefillRetries > 0);
}
