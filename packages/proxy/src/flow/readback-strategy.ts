import { failureStage, type Instance } from "@kv/fleet";
import type { KeptObject } from "@kv/fleet/front-end";
import { editMembers } from "@kv/http";
import { KvError } from "@kv/interface";
import type { Part } from "../legs/client-request.js";
import { type Legs, legValue } from "../legs/legs.js";
import type { Readback } from "../readback/readback.js";
import { type EndedTurn, readTurnAnswer } from "../readback/turn-answer.js";
import type { Refusal } from "../readback/turn-refusal.js";
import { withFields } from "../request/leg-bodies.js";
import type { LegAnswer, PrefillOutcome } from "../response/leg-answer.js";
import type { DisaggregationStrategy, PrefillEngines, TwoLegs } from "./two-legs.js";

/** Pause after a P timed out while reading a turn: its engine may lack the setting. */
const PAUSE_MS = 60_000;

/**
 * Pull, where P reads the KV of the previous turn from its D and computes the rest. Each turn is
 * used once, by a longer prompt that begins with exactly its tokens. If P cannot read it, P
 * computes the whole prompt.
 */
export class ReadbackStrategy implements DisaggregationStrategy {
  readonly name: string;
  readonly #legs: Legs;
  readonly #pull: TwoLegs;
  readonly #readback: Readback;
  readonly #engines: PrefillEngines;
  readonly #pausedUntilMs = new WeakMap<Instance, number>();

  constructor(legs: Legs, pull: TwoLegs, readback: Readback, engines: PrefillEngines) {
    this.name = `${pull.name}, readback`;
    this.#legs = legs;
    this.#pull = pull;
    this.#readback = readback;
    this.#engines = engines;
  }

  async run(given: Part): Promise<LegAnswer> {
    const { refusal, ids, digests } = await this.#readback.turnOf(given);
    if (given.deadline.aborted) throw given.deadline.reason;
    const part = this.#readingAnswer(given, refusal);
    if (refusal !== undefined) {
      this.#readback.refused(part, refusal);
      return this.#pull.run(part);
    }
    const object = await this.#readback.claim(part, digests);
    if (object === undefined) {
      this.#readback.refused(part, "no-match");
      return this.#pull.run(part);
    }
    const isChat = part.request.endpoint === "/v1/chat/completions";
    // Both legs get the compared token ids, so neither tokenises.
    const own = isChat
      ? part
      : { ...part, request: withFields(part.request, { prompt: Array.from(ids) }) };
    const members = isChat ? { set: { prompt_token_ids: JSON.stringify(Array.from(ids)) } } : {};
    const outcome = await this.#prefill(own, object, editMembers(object.params, members));
    if (outcome === undefined) return this.#pull.run(part);
    if (outcome.kind !== "kv") return this.#pull.run(own, outcome);
    const kvTransferParams = editMembers(outcome.kvTransferParams, members);
    return this.#pull.run(own, { ...outcome, kvTransferParams });
  }

  /** The part, with answers read to learn what D holds afterwards. */
  #readingAnswer(part: Part, refusal: Refusal | undefined): Part {
    const { request } = part;
    const asks = refusal === undefined && request.fields.return_token_ids !== true;
    const asking = asks
      ? { ...part, request: withFields(request, { return_token_ids: true }) }
      : part;
    return {
      ...asking,
      readAnswer: (answer) => {
        if (refusal === undefined) this.#readback.answering(answer.visit.instance);
        const ended = (turn: EndedTurn) => this.#readback.ended(asking, turn, refusal);
        return readTurnAnswer(answer, { hidesIds: asks, ended });
      },
    };
  }

  /**
   * Runs the prefill leg that reads, and so uses up, an object. Undefined where P must compute: no
   * P fits, or P failed. An object that P may still be reading goes to no other P.
   * @throws The deadline's reason.
   */
  async #prefill(
    part: Part,
    object: KeptObject,
    params: string,
  ): Promise<PrefillOutcome | undefined> {
    const { prefillers } = this.#legs;
    const readback = this.#readback;
    const holder = await this.#holderOf(part, object);
    if (holder === undefined) return undefined;
    const excluded = this.#unfit(object);
    for (;;) {
      const visit = part.deadline.aborted ? undefined : prefillers.visit(part, excluded, holder);
      if (visit === undefined) {
        await readback.objects.giveBack(object);
        if (part.deadline.aborted) throw part.deadline.reason;
        readback.refused(part, "no-prefill");
        return undefined;
      }
      const deadline = part.deadline.fork();
      try {
        const { timeoutMs } = readback.settings;
        const options = { only: visit, readTokens: object.tokens, limitMs: timeoutMs };
        const outcome = legValue(await this.#legs.prefill({ ...part, deadline }, params, options));
        if (outcome.kind === "error") {
          // P has answered and reads no more: D restarted or freed the blocks.
          readback.release(part, object);
          readback.doubt(holder);
          return this.#failed(part, visit.instance);
        }
        await readback.objects.ended(object);
        this.#used(part, object);
        return outcome;
      } catch (error) {
        if (failureStage(error) === "connect" && !part.deadline.aborted) {
          excluded.add(visit.instance);
          continue;
        }
        readback.releaseLater(part, object);
        if (part.deadline.aborted) throw part.deadline.reason;
        // vLLM waits forever without the setting, or where its kv_load_failure_policy is recompute.
        // A P that breaks off leaves its pool until it is back.
        if (KvError.is(error, "KV_REQUEST_TIMEOUT"))
          this.#pausedUntilMs.set(visit.instance, this.#legs.ambient.clock.now() + PAUSE_MS);
        return this.#failed(part, visit.instance);
      } finally {
        deadline.close();
      }
    }
  }

  /** Undefined where the D left, has a new engine, or shares its engine id with another D. */
  async #holderOf(part: Part, object: KeptObject): Promise<Instance | undefined> {
    const { objects } = this.#readback;
    const holder = this.#readback.holderOf(object);
    const { pairing } = this.#legs.fleet;
    const has =
      holder === undefined
        ? "no"
        : ((await pairing?.hasEngine(holder, object.engineId)) ?? "unknown");
    const isSure = has === "yes" || has === "unknown";
    if (isSure && holder !== undefined && !this.#readback.isDoubted(holder)) return holder;
    if (has === "shared") this.#readback.release(part, object);
    else if (has === "no") await objects.ended(object);
    else await objects.giveBack(object);
    this.#readback.refused(part, "engine");
    return undefined;
  }

  /**
   * Prefill instances that cannot read the object: paused, of an unknown or different
   * tensor-parallel size, or facing a context-parallel engine. Between engines of this project any
   * two sizes are proven.
   */
  #unfit({ tpSize, dcpSize, isKv }: KeptObject): Set<Instance> {
    const { prefillers, fleet, ambient } = this.#legs;
    const nowMs = ambient.clock.now();
    return new Set<Instance>(
      prefillers.list().filter((one) => {
        const engine = this.#engines.coordinatesOf(one);
        const ownTpSize = fleet.pairing?.status(one)?.tp_size ?? one.kv?.tpSize ?? engine?.tpSize;
        const fits = (ownTpSize === tpSize && dcpSize === 1) || (isKv && engine?.isKv === true);
        return !fits || nowMs < (this.#pausedUntilMs.get(one) ?? nowMs);
      }),
    );
  }

  #failed(part: Part, prefill: Instance): undefined {
    const { log } = this.#legs.ambient;
    this.#readback.refused(part, "failed");
    log.warn("turn-not-read", {
      requestId: part.requestId,
      instance: prefill.url,
      hint: "the prompt is computed; both instances need bidirectional_kv_xfer",
    });
    return undefined;
  }

  #used({ record }: Part, object: KeptObject): void {
    const { ambient } = this.#legs;
    const tokens = Math.min(record.cachedTokens ?? object.tokens, object.tokens);
    record.readback = "used";
    record.readbackTokens = tokens;
    ambient.metrics.count("kv_proxy_readback_used_total");
    if (tokens > 0) ambient.metrics.count("kv_proxy_readback_tokens_total", tokens);
  }
}
