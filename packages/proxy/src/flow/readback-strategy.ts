import { failureStage, type Instance } from "@kv/fleet";
import type { KeptObject } from "@kv/fleet/front-end";
import { editMembers } from "@kv/http";
import { KvError } from "@kv/interface";
import type { Part } from "../legs/client-request.js";
import type { Legs } from "../legs/legs.js";
import type { Readback } from "../readback/readback.js";
import { type EndedTurn, readTurnAnswer } from "../readback/turn-answer.js";
import type { Refusal } from "../readback/turn-refusal.js";
import { KV_REQUEST_PULL, withFields } from "../request/leg-bodies.js";
import type { LegAnswer, PrefillOutcome } from "../response/leg-answer.js";
import type { DisaggregationStrategy } from "./disaggregation-strategy.js";
import type { PrefillEngines, PullStrategy } from "./pull-strategy.js";

/**
 * A P that did not answer when it was to read an ended turn computes for so long: its engine may
 * not have the setting.
 */
const PAUSE_MS = 60_000;

/**
 * Pull, where P reads the KV of the turn before from its D and computes what is new. A turn is used
 * once, by a prompt that is longer and begins with exactly its tokens. Where P cannot read it, the
 * prompt is computed as without it.
 */
export class ReadbackStrategy implements DisaggregationStrategy {
  readonly name: string;
  readonly #legs: Legs;
  readonly #pull: PullStrategy;
  readonly #readback: Readback;
  readonly #engines: PrefillEngines;
  /** Until when a prefill instance gets no ended turn to read. */
  readonly #pausedUntilMs = new WeakMap<Instance, number>();

  constructor(legs: Legs, pull: PullStrategy, readback: Readback, engines: PrefillEngines) {
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
    // What was compared is what both legs get: they tokenise nothing.
    const own = isChat
      ? part
      : { ...part, request: withFields(part.request, { prompt: Array.from(ids) }) };
    const members = isChat ? { set: { prompt_token_ids: JSON.stringify(Array.from(ids)) } } : {};
    const outcome = await this.#prefill(own, object, editMembers(object.params, members));
    if (outcome === undefined) return this.#pull.run(part);
    if (outcome.kind !== "kv") return this.#pull.run(own, KV_REQUEST_PULL, outcome);
    const kvTransferParams = editMembers(outcome.kvTransferParams, members);
    return this.#pull.run(own, KV_REQUEST_PULL, { ...outcome, kvTransferParams });
  }

  /** The part with answers that tell what D holds after it. */
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
   * The prefill leg that reads an object, which is gone then. Undefined where it was not read, and
   * the prompt is to be computed: no P fits, or it failed. An object that P may be reading is not
   * given to another one.
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
      const attempts = { ...part.attempts, prefillRetries: 0 };
      try {
        const { timeoutMs } = readback.settings;
        const options = { only: visit, readTokens: object.tokens, limitMs: timeoutMs };
        const outcome = await this.#legs.prefill({ ...part, deadline, attempts }, params, options);
        if (outcome.kind === "error") {
          // P has answered, so it reads no more: D was restarted, or it has freed the blocks.
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
        // vLLM waits for ever where its kv_load_failure_policy is recompute, or where it has not
        // the setting. A P that breaks off is left out by its pool until it is back.
        if (KvError.is(error, "KV_REQUEST_TIMEOUT"))
          this.#pausedUntilMs.set(visit.instance, this.#legs.ambient.clock.now() + PAUSE_MS);
        return this.#failed(part, visit.instance);
      } finally {
        deadline.close();
      }
    }
  }

  /**
   * The D that holds the object; undefined where it has left, has another engine now, or shares the
   * engine's id with another D.
   */
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
   * The prefill instances that do not read the object: they could not lately, or have another
   * tensor-parallel size, or none that is known, or it is of a context parallel engine. Between
   * engines of this project any two sizes are proven.
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
