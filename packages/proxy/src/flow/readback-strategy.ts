import { failureStage, type Instance, instanceName } from "@kv/fleet";
import {
  CacheCapacities,
  type KeptObject,
  type KvObject,
  promptIds,
  readKvObject,
  TurnDigests,
  within,
} from "@kv/fleet/front-end";
import { editMembers } from "@kv/http";
import { KvError, type Timer } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import type { Part } from "../legs/client-request.js";
import { type Legs, legValue } from "../legs/legs.js";
import { sendRelease } from "../legs/release-blocks.js";
import type { ObjectStore } from "../readback/object-store.js";
import { type EndedTurn, readTurnAnswer } from "../readback/turn-answer.js";
import { type Refusal, scopeOf, turnRefusal } from "../readback/turn-refusal.js";
import { withFields } from "../request/leg-bodies.js";
import type { LegAnswer, PrefillOutcome } from "../response/leg-answer.js";
import type { DisaggregationStrategy, PrefillEngines, TwoLegs } from "./two-legs.js";

/** Token ids of a prompt, or why no turn is read or kept. */
type Turn = Refusal | { readonly ids: ArrayLike<number>; readonly digests: TurnDigests };

/** What a release needs: gateways may want the client's headers. */
type Requester = Pick<Part, "requestId" | "headers">;

/** An aborted P surely reads no more after this time. */
const SETTLE_MS = 30_000;
/** The most releases under way at once at close. */
const RELEASES = 16;
/** What is left after this time, D frees itself. */
const CLOSE_MS = 3000;

/** Pause after a P timed out while reading a turn: its engine may lack the setting. */
const PAUSE_MS = 60_000;

/**
 * Pull, where P reads the KV of the previous turn from its D and computes the rest. Each turn is
 * used once, by a longer prompt that begins with exactly its tokens. If P cannot read it, P
 * computes the whole prompt.
 */
export class ReadbackStrategy implements DisaggregationStrategy {
  readonly name: string;
  readonly #pausedUntilMs = new WeakMap<Instance, number>();
  readonly #capacities: CacheCapacities;
  readonly #turns = new WeakMap<Part["request"], Promise<Turn>>();
  /** A P could not read from them: they may have restarted. An answer clears the doubt. */
  readonly #doubted = new WeakSet<Instance>();
  readonly #timers = new Set<Timer>();

  constructor(
    private readonly legs: Legs,
    private readonly pull: TwoLegs,
    private readonly engines: PrefillEngines,
    private readonly settings: NonNullable<ProxySettings["readback"]>,
    private readonly objects: ObjectStore,
  ) {
    this.name = `${pull.name}, readback`;
    const { clock, log } = legs.ambient;
    this.#capacities = new CacheCapacities({ upstream: legs.fleet.upstream, clock, log });
  }

  async run(given: Part): Promise<LegAnswer> {
    const turn = await this.#turnOf(given);
    given.deadline.throwIfAborted();
    const refusal = typeof turn === "string" ? turn : undefined;
    const part = this.#readingAnswer(given, refusal);
    const object = typeof turn === "string" ? undefined : await this.#claim(part, turn.digests);
    if (typeof turn === "string" || object === undefined) {
      this.#refused(part, refusal ?? "no-match");
      return this.pull.run(part);
    }
    const ids = Array.from(turn.ids);
    const isChat = part.request.endpoint === "/v1/chat/completions";
    // Both legs get the compared token ids, so neither tokenises.
    const own = isChat ? part : { ...part, request: withFields(part.request, { prompt: ids }) };
    const members = isChat ? { set: { prompt_token_ids: JSON.stringify(ids) } } : {};
    const outcome = await this.#prefill(own, object, editMembers(object.params, members));
    if (outcome === undefined) return this.pull.run(part);
    if (outcome.kind !== "kv") return this.pull.run(own, outcome);
    const kvTransferParams = editMembers(outcome.kvTransferParams, members);
    return this.pull.run(own, { ...outcome, kvTransferParams });
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
        if (refusal === undefined) this.#capacities.expect(answer.visit.instance);
        const ended = (turn: EndedTurn) =>
          this.legs.inBackground(this.#ended(asking, turn, refusal));
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
    const { prefillers } = this.legs;
    const holder = await this.#holderOf(part, object);
    if (holder === undefined) return undefined;
    const excluded = this.#unfit(object);
    for (;;) {
      const visit = part.deadline.aborted ? undefined : prefillers.visit(part, excluded, holder);
      if (visit === undefined) {
        await this.objects.giveBack(object);
        part.deadline.throwIfAborted();
        this.#refused(part, "no-prefill");
        return undefined;
      }
      const deadline = part.deadline.fork();
      try {
        const { timeoutMs } = this.settings;
        const options = { only: visit, readTokens: object.tokens, limitMs: timeoutMs };
        const outcome = legValue(await this.legs.prefill({ ...part, deadline }, params, options));
        if (outcome.kind === "error") {
          // P has answered and reads no more: D restarted or freed the blocks.
          this.#release(part, object);
          this.#doubted.add(holder);
          return this.#failed(part, visit.instance);
        }
        await this.objects.ended(object);
        this.#used(part, object);
        return outcome;
      } catch (error) {
        if (failureStage(error) === "connect" && !part.deadline.aborted) {
          excluded.add(visit.instance);
          continue;
        }
        this.#releaseLater(part, object);
        part.deadline.throwIfAborted();
        // vLLM waits forever without the setting, or where its kv_load_failure_policy is recompute.
        // A P that breaks off leaves its pool until it is back.
        if (KvError.is(error, "KV_REQUEST_TIMEOUT"))
          this.#pausedUntilMs.set(visit.instance, this.legs.ambient.clock.now() + PAUSE_MS);
        return this.#failed(part, visit.instance);
      } finally {
        deadline.close();
      }
    }
  }

  /** Undefined where the D left, has a new engine, or shares its engine id with another D. */
  async #holderOf(part: Part, object: KeptObject): Promise<Instance | undefined> {
    const holder = this.#named(object);
    const { pairing } = this.legs.fleet;
    const has =
      holder === undefined
        ? "no"
        : ((await pairing?.hasEngine(holder, object.engineId)) ?? "unknown");
    const isSure = has === "yes" || has === "unknown";
    if (isSure && holder !== undefined && !this.#doubted.has(holder)) return holder;
    if (has === "shared") this.#release(part, object);
    else if (has === "no") await this.objects.ended(object);
    else await this.objects.giveBack(object);
    this.#refused(part, "engine");
    return undefined;
  }

  /**
   * Prefill instances that cannot read the object: paused, of an unknown or different
   * tensor-parallel size, or facing a context-parallel engine. Between engines of this project any
   * two sizes are proven.
   */
  #unfit({ tpSize, dcpSize, isKv }: KeptObject): Set<Instance> {
    const { prefillers, fleet, ambient } = this.legs;
    const nowMs = ambient.clock.now();
    return new Set<Instance>(
      prefillers.list().filter((one) => {
        const engine = this.engines.coordinatesOf(one);
        const ownTpSize = fleet.pairing?.status(one)?.tp_size ?? one.kv?.tpSize ?? engine?.tpSize;
        const fits = (ownTpSize === tpSize && dcpSize === 1) || (isKv && engine?.isKv === true);
        return !fits || nowMs < (this.#pausedUntilMs.get(one) ?? nowMs);
      }),
    );
  }

  #failed(part: Part, prefill: Instance): undefined {
    const { log } = this.legs.ambient;
    this.#refused(part, "failed");
    log.warn("turn-not-read", {
      requestId: part.requestId,
      instance: prefill.url,
      hint: "the prompt is computed; both instances need bidirectional_kv_xfer",
    });
    return undefined;
  }

  #used({ record }: Part, object: KeptObject): void {
    const { ambient } = this.legs;
    const tokens = Math.min(record.cachedTokens ?? object.tokens, object.tokens);
    record.readback = "used";
    record.readbackTokens = tokens;
    ambient.metrics.count("kv_proxy_readback_used_total");
    if (tokens > 0) ambient.metrics.count("kv_proxy_readback_tokens_total", tokens);
  }

  async #turnOf(part: Part): Promise<Turn> {
    const { request } = part;
    let turn = this.#turns.get(request);
    if (turn === undefined) {
      turn = this.#readTurn(part);
      this.#turns.set(request, turn);
    }
    return await turn;
  }

  async #readTurn(part: Part): Promise<Turn> {
    const { request, headers } = part;
    const refusal = turnRefusal(part);
    if (refusal !== undefined) return refusal;
    if (promptIds(request) === undefined) await this.legs.fleet.addTokenIds(request, headers);
    const ids = promptIds(request);
    return ids === undefined ? "no-ids" : { ids, digests: new TurnDigests(scopeOf(request), ids) };
  }

  async readable(part: Part): Promise<number> {
    const turn = await this.#turnOf(part);
    if (typeof turn === "string") return 0;
    const { beginnings } = await this.#find(part, turn.digests);
    return beginnings.length === 0 ? 0 : await this.objects.tokensOf(beginnings);
  }

  /** Digests of the prompt's beginnings that are as long as kept turns, and full instances. */
  async #find(part: Part, digests: TurnDigests) {
    const { tokens, crowded, expired } = await this.objects.find(digests.chunks);
    this.#expired(part, expired);
    const lengths = tokens.flat().filter((length) => length < digests.length);
    return { crowded, beginnings: lengths.map((length) => digests.of(length)) };
  }

  #refused(part: Part, reason: Refusal): void {
    part.record.readback ??= reason;
    this.legs.ambient.metrics.count("kv_proxy_readback_refused_total", 1, { reason });
  }

  /**
   * Takes the longest kept turn whose ids begin the prompt, for this caller only. The part's legs
   * then avoid a D that holds too much.
   */
  async #claim(part: Part, digests: TurnDigests): Promise<KeptObject | undefined> {
    const { crowded, beginnings } = await this.#find(part, digests);
    if (crowded.length > 0)
      for (const one of this.legs.decoders.list())
        if (crowded.includes(instanceName(one))) part.attempts.decode.avoided.add(one);
    return beginnings.length === 0 ? undefined : await this.objects.claim(beginnings);
  }

  /** Keeps the KV, or has D free it, in the background. `refusal`: why it cannot be kept. */
  async #ended(part: Part, turn: EndedTurn, refusal: Refusal | undefined): Promise<void> {
    const { instance, params } = turn;
    const { model } = part.request.fields;
    let object: KvObject | undefined;
    try {
      object = readKvObject(params);
      if (object === undefined) return;
    } catch (error) {
      this.#refused(part, "shape");
      const problem = KvError.from(error, "KV_INTERNAL", "kv_transfer_params cannot be read");
      this.legs.ambient.log.warn("turn-not-kept", { instance: instance.url, error: problem });
      await this.#sendRelease(part, instance, params, model);
      return;
    }
    const kept = refusal ?? (await this.#keep(part, turn, object));
    if (kept === undefined) return;
    this.#refused(part, kept);
    const outcome = await this.#sendRelease(part, instance, params, model);
    if (outcome !== "failed") await this.objects.ended({ ...object, ...UNKEPT });
  }

  /** Returns why the object is not kept. */
  async #keep(part: Part, turn: EndedTurn, object: KvObject): Promise<Refusal | undefined> {
    const { instance, promptIds, outputIds } = turn;
    const { cachePercent, minTokens } = this.settings;
    const { tokens, blocks, engineId, dcpSize } = object;
    this.#doubted.delete(instance);
    if (tokens < minTokens) return "short";
    // The KV of the last token is never computed.
    if (promptIds.length === 0 || promptIds.length + outputIds.length - 1 !== tokens) return "ids";
    const capacity = await this.#capacities.of(instance, engineId);
    if (capacity === undefined) return "capacity";
    // P takes the last blocks, so one block too many would shift all.
    if (blocks.length !== Math.ceil(tokens / (capacity.blockTokens * dcpSize))) return "shape";
    const digests = new TurnDigests(scopeOf(part.request), [...promptIds, ...outputIds]);
    const bytes = this.legs.fleet.pairing?.kvBytes(instance, [blocks]);
    const named = { server: instanceName(instance), model: part.request.fields.model, bytes };
    const found = { digest: digests.of(tokens), chunk: digests.chunkOf(tokens) };
    const budget = Math.floor((capacity.blocks * cachePercent) / 100);
    const { kept, release, expired } = await this.objects.keep(
      { ...object, ...named, ...found },
      budget,
    );
    this.#expired(part, expired);
    for (const one of release) this.#release(part, one);
    return kept ? undefined : "budget";
  }

  #expired(part: Part, expired: readonly KeptObject[]): void {
    if (expired.length > 0)
      this.legs.ambient.metrics.count("kv_proxy_readback_expired_total", expired.length);
    for (const one of expired) this.#release(part, one);
  }

  #release(requester: Requester, object: KeptObject): void {
    this.legs.inBackground(this.#releaseObject(requester, object));
  }

  /**
   * As `release`, once a P that may be reading has ended: blocks must not be reused under its
   * reads.
   */
  #releaseLater(requester: Requester, object: KeptObject): void {
    const timer = this.legs.ambient.clock.setTimer(() => {
      this.#timers.delete(timer);
      this.#release(requester, object);
    }, SETTLE_MS);
    this.#timers.add(timer);
  }

  /** Frees what is kept. D itself frees what a P may still read. */
  async close(): Promise<void> {
    for (const timer of this.#timers) timer.cancel();
    const left = [...(await this.objects.drop())];
    const requester = { requestId: "closing", headers: {} };
    const release = async () => {
      for (let one = left.pop(); one !== undefined; one = left.pop())
        await this.#releaseObject(requester, one);
    };
    const released = Promise.all(Array.from({ length: RELEASES }, release));
    await within(this.legs.ambient.clock, CLOSE_MS, released);
  }

  async #releaseObject(requester: Requester, object: KeptObject): Promise<void> {
    await this.objects.releasing(object);
    const holder = this.#named(object);
    if (holder === undefined) return this.objects.ended(object);
    const outcome = await this.#sendRelease(requester, holder, object.params, object.model);
    if (outcome !== "failed") await this.objects.ended(object);
  }

  #named({ server }: KeptObject): Instance | undefined {
    return this.legs.decoders.list().find((one) => instanceName(one) === server);
  }

  /**
   * P refuses a request with D's parameters turned round, and tells D that it has read the blocks.
   */
  async #sendRelease(
    requester: Requester,
    partner: Instance,
    params: string,
    model: unknown,
  ): Promise<string> {
    const { prefillers, ambient } = this.legs;
    const set = { do_remote_prefill: "true", do_remote_decode: "false" };
    const outcome = await sendRelease(this.legs, {
      pool: prefillers,
      partner,
      model,
      kvTransferParams: editMembers(params, { set }),
      requestId: requester.requestId,
      headers: requester.headers,
    });
    ambient.metrics.count("kv_proxy_readback_released_total", 1, { outcome });
    return outcome;
  }
}

/** Members of an object that was never kept: a release reads only its ids. */
const UNKEPT = { server: "", model: undefined, digest: "", chunk: "", bytes: undefined };
