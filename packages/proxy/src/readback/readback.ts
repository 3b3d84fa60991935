import type { IncomingHttpHeaders } from "node:http";
import { type Instance, instanceName } from "@kv/fleet";
import {
  CacheCapacities,
  type KeptObject,
  type KvObject,
  promptIds,
  readKvObject,
  TurnDigests,
} from "@kv/fleet/front-end";
import { editMembers } from "@kv/http";
import { KvError, type Timer } from "@kv/interface";
import type { Part } from "../legs/client-request.js";
import type { Legs } from "../legs/legs.js";
import { sendRelease } from "../legs/release-blocks.js";
import type { ObjectStore } from "./object-store.js";
import type { EndedTurn } from "./turn-answer.js";
import { type Refusal, scopeOf, turnRefusal } from "./turn-refusal.js";

export interface ReadbackSettings {
  readonly cachePercent: number;
  readonly ttlMs: number;
  readonly timeoutMs: number;
  readonly minTokens: number;
}

/** Token ids of a prompt, or why no turn is read or kept. */
export type Turn =
  | { readonly refusal: Refusal; readonly ids?: undefined; readonly digests?: undefined }
  | {
      readonly refusal?: undefined;
      readonly ids: ArrayLike<number>;
      readonly digests: TurnDigests;
    };

/** What a release needs: gateways may want the client's headers. */
type Requester = Pick<Part, "requestId" | "headers">;

/** An aborted P surely reads no more after this time. */
const SETTLE_MS = 30_000;
/** The most releases under way at once at close. */
const RELEASES = 16;
/** What is left after this time, D frees itself. */
const CLOSE_MS = 3000;

/** Keeps the KV of ended turns at their D, and frees what no further turn can use. */
export class Readback {
  readonly settings: ReadbackSettings;
  readonly objects: ObjectStore;
  readonly #legs: Legs;
  readonly #capacities: CacheCapacities;
  readonly #turns = new WeakMap<Part["request"], Promise<Turn>>();
  /** A P could not read from them: they may have restarted. An answer clears the doubt. */
  readonly #doubted = new WeakSet<Instance>();
  readonly #timers = new Set<Timer>();

  constructor(legs: Legs, settings: ReadbackSettings, objects: ObjectStore) {
    this.settings = settings;
    this.objects = objects;
    this.#legs = legs;
    const { clock, log } = legs.ambient;
    this.#capacities = new CacheCapacities({ upstream: legs.fleet.upstream, clock, log });
  }

  async turnOf(part: Part): Promise<Turn> {
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
    if (refusal !== undefined) return { refusal };
    if (promptIds(request) === undefined) await this.#legs.fleet.addTokenIds(request, headers);
    const ids = promptIds(request);
    return ids === undefined
      ? { refusal: "no-ids" }
      : { ids, digests: new TurnDigests(scopeOf(request), ids) };
  }

  async readable(part: Part): Promise<number> {
    const { digests } = await this.turnOf(part);
    if (digests === undefined) return 0;
    const { tokens, expired } = await this.objects.find(digests.chunks);
    this.#expired(part, expired);
    const lengths = tokens.flat().filter((length) => length < digests.length);
    if (lengths.length === 0) return 0;
    return await this.objects.tokensOf(lengths.map((length) => digests.of(length)));
  }

  refused(part: Part, reason: Refusal): void {
    part.record.readback ??= reason;
    this.#legs.ambient.metrics.count("kv_proxy_readback_refused_total", 1, { reason });
  }

  /**
   * Takes the longest kept turn whose ids begin the prompt, for this caller only. The part's legs
   * then avoid a D that holds too much.
   */
  async claim(part: Part, digests: TurnDigests): Promise<KeptObject | undefined> {
    const { tokens, crowded, expired } = await this.objects.find(digests.chunks);
    this.#expired(part, expired);
    if (crowded.length > 0)
      for (const one of this.#legs.decoders.list())
        if (crowded.includes(instanceName(one))) part.attempts.decode.avoided.add(one);
    const lengths = tokens.flat().filter((length) => length < digests.length);
    if (lengths.length === 0) return undefined;
    return await this.objects.claim(lengths.map((length) => digests.of(length)));
  }

  answering(instance: Instance): void {
    this.#capacities.expect(instance);
  }

  /** Keeps the KV, or has D free it, in the background. `refusal`: why it cannot be kept. */
  ended(part: Part, turn: EndedTurn, refusal: Refusal | undefined): void {
    this.#legs.inBackground(this.#ended(part, turn, refusal));
  }

  async #ended(part: Part, turn: EndedTurn, refusal: Refusal | undefined): Promise<void> {
    const { instance, params } = turn;
    const { model } = part.request.fields;
    let object: KvObject | undefined;
    try {
      object = readKvObject(params);
      if (object === undefined) return;
    } catch (error) {
      this.refused(part, "shape");
      const problem = KvError.from(error, "KV_INTERNAL", "kv_transfer_params cannot be read");
      this.#legs.ambient.log.warn("turn-not-kept", { instance: instance.url, error: problem });
      await this.#release(part, instance, params, model);
      return;
    }
    const kept = refusal ?? (await this.#keep(part, turn, object));
    if (kept === undefined) return;
    this.refused(part, kept);
    const outcome = await this.#release(part, instance, params, model);
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
    const bytes = this.#legs.fleet.pairing?.kvBytes(instance, [blocks]);
    const named = { server: instanceName(instance), model: part.request.fields.model, bytes };
    const found = { digest: digests.of(tokens), chunk: digests.chunkOf(tokens) };
    const budget = Math.floor((capacity.blocks * cachePercent) / 100);
    const { kept, release, expired } = await this.objects.keep(
      { ...object, ...named, ...found },
      budget,
    );
    this.#expired(part, expired);
    for (const one of release) this.release(part, one);
    return kept ? undefined : "budget";
  }

  #expired(part: Part, expired: readonly KeptObject[]): void {
    if (expired.length > 0)
      this.#legs.ambient.metrics.count("kv_proxy_readback_expired_total", expired.length);
    for (const one of expired) this.release(part, one);
  }

  release(requester: Requester, object: KeptObject): void {
    this.#legs.inBackground(this.#releaseObject(requester, object));
  }

  /**
   * As `release`, once a P that may be reading has ended: blocks must not be reused under its
   * reads.
   */
  releaseLater(requester: Requester, object: KeptObject): void {
    const timer = this.#legs.ambient.clock.setTimer(() => {
      this.#timers.delete(timer);
      this.release(requester, object);
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
    let timer: Timer | undefined;
    const late = new Promise<void>((resolve) => {
      timer = this.#legs.ambient.clock.setTimer(resolve, CLOSE_MS);
    });
    await Promise.race([Promise.all(Array.from({ length: RELEASES }, release)), late]);
    timer?.cancel();
  }

  async #releaseObject(requester: Requester, object: KeptObject): Promise<void> {
    await this.objects.releasing(object);
    const holder = this.holderOf(object);
    if (holder === undefined) return this.objects.ended(object);
    const outcome = await this.#release(requester, holder, object.params, object.model);
    if (outcome !== "failed") await this.objects.ended(object);
  }

  doubt(holder: Instance): void {
    this.#doubted.add(holder);
  }

  /** Whether a P could not read from a D that has not answered since. */
  isDoubted(holder: Instance): boolean {
    return this.#doubted.has(holder);
  }

  holderOf({ server }: KeptObject): Instance | undefined {
    return this.#legs.decoders.list().find((one) => instanceName(one) === server);
  }

  /**
   * P refuses a request with D's parameters turned round, and tells D that it has read the blocks.
   */
  async #release(
    requester: Requester,
    partner: Instance,
    params: string,
    model: unknown,
  ): Promise<string> {
    const { prefillers, ambient } = this.#legs;
    const set = { do_remote_prefill: "true", do_remote_decode: "false" };
    const outcome = await sendRelease(this.#legs, {
      pool: prefillers,
      partner,
      model,
      kvTransferParams: editMembers(params, { set }),
      requestId: requester.requestId,
      headers: requester.headers as IncomingHttpHeaders,
    });
    ambient.metrics.count("kv_proxy_readback_released_total", 1, { outcome });
    return outcome;
  }
}

/** Members of an object that was never kept: a release reads only its ids. */
const UNKEPT = { server: "", model: undefined, digest: "", chunk: "", bytes: undefined };
