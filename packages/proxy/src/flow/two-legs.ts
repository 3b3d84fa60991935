import type { Instance, Pairing, Visit } from "@kv/fleet";
import { type Deadline, hostOf, within } from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import type { Part } from "../legs/client-request.js";
import { type LegEnd, type Legs, legValue } from "../legs/legs.js";
import { releaseUntaken } from "../legs/release-blocks.js";
import { HeldBlocks } from "../legs/tries.js";
import { KV_REQUEST_PULL, KV_REQUEST_PUSH, withIdSuffix } from "../request/leg-bodies.js";
import {
  cachedTokensOf,
  type LegAnswer,
  type PrefillError,
  type PrefilledKv,
  type PrefillOutcome,
} from "../response/leg-answer.js";
import { type Fault, requireAnyInstance } from "../upstream/upstream-errors.js";

/** The order of a part's legs, and the KV parameters that each carries. */
export interface DisaggregationStrategy {
  /** Shown as `flow` on status pages. */
  readonly name: string;
  /**
   * Runs the legs until the decode leg's answer begins. The caller ends the answer's visit. On an
   * error or abort, P keeps no blocks that could be freed.
   * @throws The errors of the legs, and the deadline's reason.
   */
  run(part: Part): Promise<LegAnswer>;
}

/**
 * A prefill and a decode leg. `pull`: P's answer names its KV, and D READs it (vLLM's
 * NixlConnector). `push`: both at once (`ConcurrentLegs`), or one after the other if P's
 * coordinates are unknown, the setting says so, or the part begins again. `auto`: P's
 * `transfer_mode` decides; the first request runs one leg after the other under a unique id, which
 * suits both. A failed decode leg sends the part back to the prefill leg, as P may have freed the
 * blocks.
 */
export class TwoLegs implements DisaggregationStrategy {
  readonly name: string;
  readonly #mode: ProxySettings["mode"];
  readonly #atOnce: boolean;

  constructor(
    private readonly legs: Legs,
    private readonly engines: PrefillEngines,
  ) {
    const { mode, pushLegs } = legs.settings;
    this.#mode = mode;
    this.#atOnce = pushLegs === "at-once";
    this.name = mode === "push" && !this.#atOnce ? "push, prefill first" : mode;
  }

  /** `prefilled`: an ended prefill leg, for the first decode leg. */
  async run(given: Part, prefilled?: PrefillOutcome): Promise<LegAnswer> {
    const part = await this.#located(given);
    for (let isFirst = true; ; isFirst = false) {
      requireAnyInstance(this.legs.decoders);
      const round = await this.#round(part, isFirst, prefilled);
      const answer = await this.#answerOf(part, round, isFirst);
      if (answer !== undefined) return answer;
    }
  }

  /** Learns who has the prompt's start, and whether another P would have its KV sooner. */
  async #located(part: Part): Promise<Part> {
    const { kvSources } = this.legs.fleet;
    if (kvSources === undefined) return part;
    const kvHolders = part.kvHolders ?? (await kvSources.holders(part));
    const { avoided } = part.attempts.prefill;
    const preferredPrefill =
      kvSources.soonerThanChosen(part, kvHolders, avoided) ?? part.preferredPrefill;
    return { ...part, kvHolders, preferredPrefill };
  }

  async #round(given: Part, isFirst: boolean, prefilled?: PrefillOutcome): Promise<Round> {
    if (this.#mode === "pull")
      return this.#sequential(given, KV_REQUEST_PULL, isFirst ? prefilled : undefined);
    const instance = await this.#chosenPrefill(given);
    const mode =
      this.#mode === "push" || instance === undefined ? this.#mode : this.engines.modeOf(instance);
    const preferredPrefill = instance ?? given.preferredPrefill;
    if (mode === "pull") return this.#sequential({ ...given, preferredPrefill }, KV_REQUEST_PULL);
    // The engines match legs by id, so an id that clients reuse would match another prompt's KV.
    const suffix = `-${this.legs.ambient.random.uuid()}`;
    const part = {
      ...given,
      preferredPrefill,
      requestId: `${given.requestId}${suffix}`,
      request: withIdSuffix(given.request, suffix),
    };
    const coordinates = instance && this.engines.coordinatesOf(instance);
    // The coordinates are this instance's, so no other may take its place.
    if (mode === "push" && this.#atOnce && isFirst && instance && coordinates)
      return new ConcurrentLegs(this.legs, this.engines, part, instance.begin(), coordinates).run();
    return this.#sequential(part, mode === "push" ? KV_REQUEST_PUSH : KV_REQUEST_PULL);
  }

  async #chosenPrefill(part: Part) {
    const { prefillers, fleet } = this.legs;
    const { prefill, decode } = part.attempts;
    const partner = { avoiding: decode.avoided };
    const choose = () => prefillers.choose(part, prefill.avoided, partner);
    const instance = choose();
    const reading = instance === undefined ? undefined : fleet.pairing?.certain(instance);
    if (reading === undefined || this.#mode === "auto") return instance;
    await reading;
    return choose();
  }

  async #sequential(part: Part, kvRequest: string, prefilled?: PrefillOutcome): Promise<Round> {
    const end =
      prefilled === undefined ? await this.legs.prefill(part, kvRequest) : { value: prefilled };
    const outcome = end.value;
    if (outcome?.kind !== "kv") return { prefilled: end, mayRetry: false };
    const { instance, kvTransferParams, atMs } = outcome;
    const held = new HeldBlocks();
    let ended = () => {};
    try {
      this.engines.learn(outcome);
      await this.engines.confirm(instance);
      // The request may have ended with the answer's last bytes.
      part.deadline.throwIfAborted();
      const { remote_block_ids: blockIds } = outcome.fields.kv_transfer_params as {
        readonly remote_block_ids?: unknown;
      };
      ended = this.legs.fleet.signals.kvReady(instance, blockIds, atMs);
      await this.legs.fleet.pairing?.certain(instance);
      const leaseEndsAtMs = atMs + this.legs.settings.timeouts.leaseMs;
      const kv = { params: kvTransferParams, prefill: instance, leaseEndsAtMs, held };
      const decoded = await this.legs.decode(part, kv);
      return { prefill: instance, decoded };
    } finally {
      if (!held.isTaken) releaseUntaken(this.legs, part, outcome, held);
      ended();
    }
  }

  /**
   * The client's answer; undefined where the part must begin again.
   * @throws The error of the failed leg.
   */
  async #answerOf(part: Part, round: Round, isFirst: boolean): Promise<LegAnswer | undefined> {
    if ("again" in round) return this.#beginAgain(part, round.again);
    if ("prefilled" in round) return this.#afterPrefill(part, round);
    const { attempts, deadline } = part;
    const { prefill, decoded } = round;
    const { fault, value: answer, error } = decoded;
    if (fault === undefined && answer !== undefined) return answer;
    const { decoders, ambient } = this.legs;
    const moves = this.#mayMove(part, prefill, fault, error);
    const again = KvError.is(error, "KV_LEASE_EXPIRED")
      ? isFirst
      : moves || (await attempts.decode.again(fault, decoders.list(), deadline, ambient.clock));
    if (!again) return legValue(decoded);
    answer?.discard();
    // With one D, only P can change: vLLM's D answers 500 when the P that holds its KV has ended
    // (`kv_load_failure_policy` "fail").
    const isForKv = answer?.status === 500 && decoders.list().length === 1;
    if (moves || isForKv) attempts.prefill.avoided.add(prefill);
    return this.#beginAgain(part, error?.message ?? `a decode instance answered ${answer?.status}`);
  }

  async #afterPrefill(
    part: Part,
    { prefilled, mayRetry }: Extract<Round, { readonly prefilled: unknown }>,
  ): Promise<LegAnswer | undefined> {
    const { fault, value: outcome } = prefilled;
    if (outcome?.kind === "no-kv") {
      const { instance } = outcome;
      requireDecodeAlone(this.legs, instance);
      return this.legs.single(part, "no-kv", `${instance.url} answered without kv_transfer_params`);
    }
    if (outcome?.kind === "error" && refusesOwnLimit(part, outcome)) {
      const why = `${outcome.instance.url} refused the limit of its leg`;
      return this.legs.single(part, "no-kv", why);
    }
    if (mayRetry) {
      const { attempts, prefillers, deadline } = part;
      const all = prefillers ?? this.legs.prefillers.list();
      const again =
        fault === "unreachable" ||
        fault === "lacks-model" ||
        (await attempts.prefill.again(fault, all, deadline, this.legs.ambient.clock));
      if (again) return this.#beginAgain(part, `the prefill leg failed: ${fault}`);
    }
    return (legValue(prefilled) as PrefillError).answer;
  }

  /** Whether no D that fits this P took the leg, and another pair exists. */
  #mayMove(
    { attempts }: Part,
    prefill: Instance,
    fault: Fault | undefined,
    error: KvError | undefined,
  ): boolean {
    const isUntaken = fault === "unreachable" || KvError.is(error, "KV_PROXY_NO_INSTANCE");
    if (!isUntaken || this.legs.fleet.pairing?.hasOther(prefill) !== true) return false;
    attempts.pairs -= 1;
    return attempts.pairs >= 0;
  }

  #beginAgain({ requestId, record }: Part, why: string): undefined {
    const { log, metrics } = this.legs.ambient;
    const { prefill, decode } = record;
    log.warn("began-again", { requestId, prefill, decode, why });
    metrics.count("kv_proxy_restarts_total");
    record.restarted();
    return undefined;
  }
}

/** How errors name a token limit. The prefill leg's own is one token, or zero with echo. */
const LIMIT = /\bmax_(?:completion_|output_)?tokens\b|\b[01] output tokens?\b/;

/** Whether P refuses the leg's own limit, which no client set. D checks the client's. */
function refusesOwnLimit({ request: { fields } }: Part, { answer }: PrefillError): boolean {
  const limit = fields.max_completion_tokens ?? fields.max_tokens ?? fields.max_output_tokens;
  return answer.status === 400 && limit !== 1 && LIMIT.test(answer.held.toString("utf8"));
}

/** @throws `KV_PROXY_UPSTREAM_FAILED`, unless the policy lets D compute prompts without KV. */
function requireDecodeAlone({ settings }: Legs, { url }: Instance): void {
  if (settings.policy.missingKv === "decode-computes") return;
  throw new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `the prefill instance ${url} answered 200 without kv_transfer_params for a decode worker`,
    {
      hint: "start it with a kv_transfer_config of role kv_producer or kv_both; or let decode workers compute such prompts with --missing-kv decode-computes",
      details: { role: "prefill", instance: url },
    },
  );
}

/** `again`: why both legs must begin again. */
type Round =
  | { readonly again: string }
  | { readonly prefilled: LegEnd<PrefillOutcome>; readonly mayRetry: boolean }
  | { readonly prefill: Instance; readonly decoded: LegEnd<LegAnswer> };

/** How long an answer waits for P's number of cached tokens. */
const CACHED_TOKENS_MS = 1000;

/**
 * The legs of one part, sent at once. P WRITEs the KV into D (vLLM's NixlPushConnector), and the
 * decode leg carries the coordinates of P's engine.
 */
class ConcurrentLegs {
  readonly #prefill: Instance;
  readonly #prefillDeadline: Deadline;
  readonly #decodeDeadline: Deadline;
  readonly #held = new HeldBlocks();
  #learned: EngineCoordinates | undefined;
  readonly #prefilling: Promise<LegEnd<PrefillOutcome>>;
  readonly #decoding: Promise<LegEnd<LegAnswer>>;

  /**
   * The prefill leg goes to the instance of `visit`, whose `coordinates` the decode leg carries.
   */
  constructor(
    private readonly legs: Legs,
    engines: PrefillEngines,
    private readonly part: Part,
    visit: Visit,
    private readonly coordinates: EngineCoordinates,
  ) {
    this.#prefill = visit.instance;
    this.#prefillDeadline = part.deadline.fork();
    this.#decodeDeadline = part.deadline.fork();
    const failed = (thrown: unknown) => ({
      error: KvError.from(thrown, "KV_INTERNAL", "a leg failed"),
    });
    this.#prefilling = legs
      .prefill({ ...part, deadline: this.#prefillDeadline }, KV_REQUEST_PUSH, { only: visit })
      .then((end) => {
        if (end.value?.kind === "kv") {
          this.#learned = engines.learn(end.value);
          void engines.confirm(end.value.instance);
        }
        return end;
      }, failed);
    this.#decoding = legs
      .decode(
        { ...part, deadline: this.#decodeDeadline },
        {
          params: registrationParams(coordinates, part.requestId),
          prefill: visit.instance,
          held: this.#held,
        },
      )
      .catch(failed);
  }

  /** @throws The deadline's reason. */
  async run(): Promise<Round> {
    try {
      return await this.#firstEnded();
    } finally {
      this.legs.inBackground(this.#bothEnded());
    }
  }

  /** Releases KV that P holds and D has not taken. */
  async #bothEnded(): Promise<void> {
    const [{ value }] = await Promise.all([this.#prefilling, this.#decoding]);
    if (value?.kind !== "kv") return;
    // D's parameters name the previous engine.
    const held = this.#isOtherEngine ? new HeldBlocks() : this.#held;
    if (!held.isTaken) releaseUntaken(this.legs, this.part, value, held);
  }

  async #firstEnded(): Promise<Round> {
    // Once P holds KV, the decode leg decides. A shared promise that never settles would keep every
    // race and its answer in memory.
    const prefillFailed = this.#prefilling.then((end) =>
      end.value?.kind === "kv" ? new Promise<never>(() => {}) : end,
    );
    const first = await Promise.race([
      this.#decoding.then((decoded) => ({ decoded })),
      prefillFailed.then((prefilled) => ({ prefilled })),
    ]);
    if ("prefilled" in first) return this.#afterPrefill(first.prefilled);
    const { decoded } = first;
    const { value: answer } = decoded;
    const prefill = this.#prefill;
    if (answer === undefined || decoded.fault !== undefined) {
      this.#prefillDeadline.abort(new KvError("KV_REQUEST_ABORTED", "the decode leg failed"));
      await this.#prefilling;
      this.part.deadline.throwIfAborted();
      return { prefill, decoded };
    }
    if (answer.status === 200) return { prefill, decoded: { value: this.#counted(answer) } };
    return this.#afterPrefill(await this.#prefilling);
  }

  async #afterPrefill(prefilled: LegEnd<PrefillOutcome>): Promise<Round> {
    const prefill = this.#prefill;
    const { value: outcome } = prefilled;
    if (outcome?.kind === "kv" && !this.#isOtherEngine) {
      const decoded = await this.#decoding;
      const { value: answer } = decoded;
      if (answer === undefined) return { prefill, decoded };
      const value = this.#counted(answer);
      return { prefill, decoded: { ...decoded, value, error: undefined } };
    }
    const why = this.#isOtherEngine
      ? "the prefill engine was restarted"
      : "the prefill leg brought no KV";
    this.#decodeDeadline.abort(new KvError("KV_REQUEST_ABORTED", why));
    const { value: answer } = await this.#decoding;
    answer?.discard();
    answer?.visit.abandoned();
    this.part.deadline.throwIfAborted();
    return this.#isOtherEngine ? { again: why } : { prefilled, mayRetry: true };
  }

  /** P answered from another engine than the decode leg names. */
  get #isOtherEngine(): boolean {
    return this.#learned !== undefined && this.#learned.engineId !== this.coordinates.engineId;
  }

  #counted(answer: LegAnswer): LegAnswer {
    return { ...answer, cachedTokens: () => this.#cachedTokens() };
  }

  /** D already has P's KV, so P's answer is near. */
  async #cachedTokens(): Promise<number | undefined> {
    const { clock } = this.legs.ambient;
    const outcome = (await within(clock, CACHED_TOKENS_MS, this.#prefilling))?.value;
    return outcome?.kind === "kv" ? cachedTokensOf(outcome.fields) : undefined;
  }
}

/**
 * `kv_transfer_params` (JSON text) for a decode leg sent together with its prefill leg: no blocks
 * exist yet (vLLM 0.33, push).
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

/** Where D's engine reaches P's, for push. */
export interface EngineCoordinates {
  /** vLLM's `engine_id`, new with each start of the engine. */
  readonly engineId: string;
  readonly host: string;
  readonly port: number;
  readonly tpSize: number;
  /** Pipeline-parallel size: D awaits the notifications of this many stages. */
  readonly ppSize: number;
  /** Decode-context-parallel size: D plans for each rank's share of the prompt. */
  readonly dcpSize: number;
  /** Whether it is an engine of this project. */
  readonly isKv: boolean;
}

/** vLLM's default of VLLM_NIXL_SIDE_CHANNEL_PORT. */
const DEFAULT_PORT = 5600;

/** Engines of prefill instances. Their last `kv_transfer_params` override the configuration. */
export class PrefillEngines {
  readonly #modes = new WeakMap<Instance, "pull" | "push">();
  readonly #coordinates = new WeakMap<Instance, EngineCoordinates>();

  /** `pairing` learns which engines answer. */
  constructor(private readonly pairing?: Pairing) {}

  /** Undefined until the engine's id is known. */
  coordinatesOf(instance: Instance): EngineCoordinates | undefined {
    const learned = this.#coordinates.get(instance);
    if (learned !== undefined) return learned;
    const { kv, url } = instance;
    if (kv?.engineId === undefined) return undefined;
    return {
      engineId: kv.engineId,
      host: kv.host ?? hostOf(url),
      port: kv.port ?? DEFAULT_PORT,
      tpSize: kv.tpSize ?? 1,
      ppSize: kv.ppSize ?? 1,
      dcpSize: kv.dcpSize ?? 1,
      isKv: false,
    };
  }

  /**
   * Whether the engine pulls or pushes (`transfer_mode`, vLLM 0.32 and 0.33). Undefined before its
   * first answer.
   */
  modeOf(instance: Instance): "pull" | "push" | undefined {
    return this.#modes.get(instance);
  }

  learn({ instance, fields }: PrefilledKv): EngineCoordinates | undefined {
    const params = fields.kv_transfer_params as Readonly<Record<string, unknown>>;
    this.#modes.set(instance, params.transfer_mode === "push" ? "push" : "pull");
    const found = coordinatesIn(params);
    if (found !== undefined) this.#coordinates.set(instance, found);
    return found;
  }

  /**
   * Resolves once a new engine's side channel was read; undefined where nothing is to be awaited.
   */
  confirm(instance: Instance): Promise<void> | undefined {
    const mode = this.#modes.get(instance);
    const learned = this.#coordinates.get(instance);
    if (mode === undefined || learned === undefined) return undefined;
    const { engineId, host, port, tpSize } = learned;
    return this.pairing?.answered(instance, { engineId, host, port, tpSize, mode });
  }
}

function coordinatesIn(params: Readonly<Record<string, unknown>>): EngineCoordinates | undefined {
  const { remote_engine_id: engineId, remote_host: host, remote_port: port } = params;
  if (typeof engineId !== "string" || typeof host !== "string" || typeof port !== "number")
    return undefined;
  const size = (value: unknown) => (typeof value === "number" ? value : 1);
  const { tp_size: tpSize, pp_size: ppSize, dcp_size: dcpSize, kv_peer: peer } = params;
  const sizes = { tpSize: size(tpSize), ppSize: size(ppSize), dcpSize: size(dcpSize) };
  return { engineId, host, port, ...sizes, isKv: peer != null };
}
