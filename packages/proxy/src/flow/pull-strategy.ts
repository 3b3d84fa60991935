import { failureStage, type Instance, type InstancePool, type Pairing } from "@kv/fleet";
import { KvError } from "@kv/interface";
import type { Attempts, Part } from "../legs/client-request.js";
import type { Legs } from "../legs/legs.js";
import { releaseUntaken } from "../legs/release-blocks.js";
import { KV_REQUEST_PULL } from "../request/leg-bodies.js";
import {
  KvUse,
  type LegAnswer,
  type PrefillError,
  type PrefilledKv,
  type PrefillOutcome,
  type PrefillWithoutKv,
  withPromptAnswer,
} from "../response/leg-answer.js";
import { badStatus, isServerFailure, requireAnyInstance } from "../upstream/upstream-errors.js";
import type { DisaggregationStrategy } from "./disaggregation-strategy.js";

/**
 * The prefill leg, then the decode leg with the KV parameters that the prefill worker answered: the
 * decode worker READs the KV (vLLM's NixlConnector). After a failed decode leg the part begins
 * again with the prefill leg, as its blocks may be freed by then.
 */
export class PullStrategy implements DisaggregationStrategy {
  readonly name = "pull";
  readonly #legs: Legs;
  readonly #engines: PrefillEngines;

  /** What prefill workers answer is recorded in `engines`. */
  constructor(legs: Legs, engines: PrefillEngines) {
    this.#legs = legs;
    this.#engines = engines;
  }

  /**
   * `kvRequest` (JSON text) makes the prefill worker keep the KV. `prefilled`: a prefill leg that
   * has ended, for the first decode leg.
   */
  async run(
    part: Part,
    kvRequest = KV_REQUEST_PULL,
    prefilled?: PrefillOutcome,
  ): Promise<LegAnswer> {
    for (let round = 1; ; round += 1) {
      requireAnyInstance(this.#legs.decoders);
      const prefill =
        (round === 1 ? prefilled : undefined) ?? (await this.#legs.prefill(part, kvRequest));
      if (prefill.kind === "error") {
        if (!refusesOwnLimit(part, prefill)) return prefill.answer;
        return this.#legs.single(
          part,
          "no-kv",
          `${prefill.instance.url} refused the limit of its leg`,
        );
      }
      if (prefill.kind === "kv") {
        this.#engines.learn(prefill);
        await this.#engines.confirm(prefill.instance);
        this.#releaseIfAborted(part, prefill);
      } else requireDecodeAlone(this.#legs, prefill);
      const answer = await this.#decodeOrRestart(part, prefill, round);
      if (answer !== undefined) return answer;
    }
  }

  /**
   * Releases the blocks and throws where the request ended while the last bytes of the prefill
   * answer came.
   */
  #releaseIfAborted(part: Part, prefill: PrefilledKv): void {
    if (!part.deadline.aborted) return;
    releaseUntaken(this.#legs, part, prefill, new KvUse());
    throw part.deadline.reason;
  }

  /** The decode leg's answer; undefined when it failed and the part is to begin again. */
  async #decodeOrRestart(
    part: Part,
    prefill: PrefilledKv | PrefillWithoutKv,
    round: number,
  ): Promise<LegAnswer | undefined> {
    const { attempts } = part;
    let answer: LegAnswer | undefined;
    let failure: unknown;
    let movesPrefill = false;
    try {
      answer = await this.#decode(part, prefill);
      failure = serverFailureWithAlternative(this.#legs.decoders, answer);
      if (failure === undefined && prefill.kind === "kv") {
        failure = failureMaybeOfKv(answer);
        // The one decode instance is tried again: what can change is the prefill instance.
        movesPrefill = failure !== undefined;
      }
      if (failure === undefined) return answer;
      attempts.failedDecode.add(answer.visit.instance);
    } catch (error) {
      failure = error;
    }
    const moves = this.#mayMove(part, prefill, failure);
    const restart =
      !part.deadline.aborted &&
      (KvError.is(failure, "KV_LEASE_EXPIRED")
        ? round === 1
        : moves || mayRestart(attempts, failure));
    if (!restart) {
      if (answer !== undefined) return answer;
      throw failure;
    }
    answer?.discard();
    answer?.visit.failed(KvError.from(failure, "KV_INTERNAL", "the decode leg failed"));
    attempts.restarts = 0;
    if (moves || movesPrefill) attempts.failedPrefill = new Set([prefill.instance]);
    const { log, metrics } = this.#legs.ambient;
    log.warn("began-again", {
      requestId: part.requestId,
      decode: part.record.decode,
      error: failure,
    });
    metrics.count("kv_proxy_restarts_total");
    part.record.restarted();
    return undefined;
  }

  /** No decode instance that fits this prefill instance took the leg, and there is another pair. */
  #mayMove(
    { attempts }: Part,
    { instance }: PrefilledKv | PrefillWithoutKv,
    failure: unknown,
  ): boolean {
    const untaken =
      failureStage(failure) === "connect" || KvError.is(failure, "KV_PROXY_NO_INSTANCE");
    return (
      untaken && attempts.restarts > 0 && this.#legs.fleet.pairing?.hasOther(instance) === true
    );
  }

  #decode(part: Part, prefill: PrefilledKv | PrefillWithoutKv): Promise<LegAnswer> {
    if (prefill.kind === "kv") return this.#decodeWithKv(part, prefill);
    const { url } = prefill.instance;
    return this.#legs.single(part, "no-kv", `${url} answered without kv_transfer_params`);
  }

  async #decodeWithKv(part: Part, prefill: PrefilledKv): Promise<LegAnswer> {
    const { kvTransferParams, instance } = prefill;
    const leaseEndsAtMs = prefill.atMs + this.#legs.settings.timeouts.leaseMs;
    const { remote_block_ids: blockIds } = prefill.fields.kv_transfer_params as {
      readonly remote_block_ids?: unknown;
    };
    const ended = this.#legs.fleet.signals.kvReady(instance, blockIds, prefill.atMs);
    const use = new KvUse();
    try {
      await this.#legs.fleet.pairing?.certain(instance);
      const answer = await this.#legs.decode(part, kvTransferParams, {
        prefill: instance,
        leaseEndsAtMs,
        use,
      });
      return withPromptAnswer(answer, part.request, prefill);
    } finally {
      if (!use.isTaken) releaseUntaken(this.#legs, part, prefill, use);
      ended();
    }
  }
}

/** A refusal in words about a limit: that of the prefill leg is one token, or none with echo. */
const LIMIT = /\bmax_(?:completion_|output_)?tokens\b|\b[01] output tokens?\b/;

/**
 * Whether a P refuses a request in words about the limit of its leg, which its client has not set.
 * A D, with the client's own limit, says what is wrong.
 */
export function refusesOwnLimit({ request: { fields } }: Part, { answer }: PrefillError): boolean {
  const limit = fields.max_completion_tokens ?? fields.max_tokens ?? fields.max_output_tokens;
  return answer.status === 400 && limit !== 1 && LIMIT.test(answer.held.toString("utf8"));
}

/** Whether the part may begin again after this failure of its decode leg. */
export function mayRestart({ restarts }: Attempts, error: unknown): boolean {
  const stage = failureStage(error);
  return restarts > 0 && stage !== undefined && stage !== "connect";
}

/**
 * The failure in a server's answer that the client need not see, as another instance of the pool is
 * available; else undefined.
 */
export function serverFailureWithAlternative(
  pool: InstancePool,
  { visit, status }: LegAnswer,
): KvError | undefined {
  const { instance } = visit;
  if (!isServerFailure(status)) return undefined;
  if (!pool.list().some((other) => other !== instance && other.available())) return undefined;
  return badStatus(instance.role, instance.url, status);
}

/**
 * The 500 of a decode instance that was to get KV: it may be for want of the KV, as the prefill
 * instance has ended (vLLM's `kv_load_failure_policy` "fail"); else undefined.
 */
export function failureMaybeOfKv({ visit: { instance }, status }: LegAnswer): KvError | undefined {
  return status === 500 ? badStatus(instance.role, instance.url, status) : undefined;
}

/**
 * @throws `KV_PROXY_UPSTREAM_FAILED`, unless the policy lets a decode instance compute prompts
 * without KV.
 */
export function requireDecodeAlone({ settings }: Legs, { instance }: PrefillWithoutKv): void {
  if (settings.policy.missingKv === "decode-computes") return;
  const { url } = instance;
  throw new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `the prefill instance ${url} answered 200 without kv_transfer_params for a decode worker`,
    {
      hint: "start it with a kv_transfer_config of role kv_producer or kv_both; or let decode workers compute such prompts with --missing-kv decode-computes",
      details: { role: "prefill", instance: url },
    },
  );
}

/** Where decode engines reach the engine of a prefill instance, for push. */
export interface EngineCoordinates {
  /** vLLM's `engine_id`, which is new with each start of the engine. */
  readonly engineId: string;
  /** Host of its side channel. */
  readonly host: string;
  /** Port of its side channel. */
  readonly port: number;
  /** Its tensor-parallel size. */
  readonly tpSize: number;
  /** Its pipeline-parallel size: D waits for the notifications of so many stages. */
  readonly ppSize: number;
  /** Its decode-context-parallel size: D plans for the share of the prompt that each rank has. */
  readonly dcpSize: number;
  /** Whether it is an engine of this project. */
  readonly isKv: boolean;
}

interface Learned {
  readonly mode: "pull" | "push";
  readonly coordinates: EngineCoordinates | undefined;
}

/** vLLM's default of VLLM_NIXL_SIDE_CHANNEL_PORT. */
const DEFAULT_PORT = 5600;

/**
 * The engines of prefill instances: from their configuration and, preferred, from the last
 * `kv_transfer_params` that each has answered.
 */
export class PrefillEngines {
  readonly #pairing: Pairing | undefined;
  readonly #learned = new WeakMap<Instance, Learned>();

  /** `pairing` is told which engines answer. */
  constructor(pairing?: Pairing) {
    this.#pairing = pairing;
  }

  /** Undefined while the engine's id is not known. */
  coordinatesOf(instance: Instance): EngineCoordinates | undefined {
    const learned = this.#learned.get(instance)?.coordinates;
    if (learned !== undefined) return learned;
    const { kv, url } = instance;
    if (kv?.engineId === undefined) return undefined;
    return {
      engineId: kv.engineId,
      host: kv.host ?? new URL(url).hostname.replace(/^\[|\]$/g, ""),
      port: kv.port ?? DEFAULT_PORT,
      tpSize: kv.tpSize ?? 1,
      ppSize: kv.ppSize ?? 1,
      dcpSize: kv.dcpSize ?? 1,
      isKv: false,
    };
  }

  /**
   * Whether the engine's connector pulls or pushes (`transfer_mode`, vLLM 0.32 and 0.33); undefined
   * before its first answer.
   */
  modeOf(instance: Instance): "pull" | "push" | undefined {
    return this.#learned.get(instance)?.mode;
  }

  /**
   * Records the `kv_transfer_params` of an instance's answer, and returns the coordinates in them.
   */
  learn({ instance, fields }: PrefilledKv): EngineCoordinates | undefined {
    const params = fields.kv_transfer_params as Readonly<Record<string, unknown>>;
    const mode = params.transfer_mode === "push" ? "push" : "pull";
    const found = coordinatesIn(params);
    const coordinates = found ?? this.#learned.get(instance)?.coordinates;
    this.#learned.set(instance, { mode, coordinates });
    return found;
  }

  /**
   * Passes the engine of an instance's last answer on to pairing. Resolves when its side channel
   * was read, where it is another engine than before; undefined where nothing is to be waited for.
   */
  confirm(instance: Instance): Promise<void> | undefined {
    const learned = this.#learned.get(instance);
    if (this.#pairing === undefined || learned?.coordinates === undefined) return undefined;
    const { engineId, host, port, tpSize } = learned.coordinates;
    return this.#pairing.answered(instance, { engineId, host, port, tpSize, mode: learned.mode });
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
