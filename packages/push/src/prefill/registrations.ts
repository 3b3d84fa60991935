import { ExpiringSet, type SendableRequest } from "@kv/connector/building-blocks";
import { type Clock, KvError, type Timer } from "@kv/interface";
import {
  baseRequestId,
  decodePrompt,
  type EncodedPrompt,
  promptDigest,
  type Registration,
  type RegistrationExtension,
  type RemoteLease,
  sameCapability,
} from "@kv/protocol";
import { AliasIndex, type ProducedRequest, type ProducedRequests } from "./produced-requests.js";

/** Registrations that wait. */
const MAX_WAITING = 65_536;
/** What they hold, in bytes: room for 13,000 prompts of 10,000 tokens in blocks of 16. */
export const MAX_WAITING_BYTES = 64 * 2 ** 20;
/** A registration without its block ids. */
const REGISTRATION_BYTES = 2048;
const BLOCK_ID_BYTES = 8;
/** Ended registrations that are remembered by their keys. */
const MAX_KEYS = 65_536;
/** Consumer processes whose watermarks are remembered. */
const MAX_CONSUMERS = 4096;

/** The result of a search for the request of a registration. */
export type Match =
  | { readonly kind: "matched"; readonly request: ProducedRequest }
  | { readonly kind: "wait" }
  /** The request will never match. */
  | { readonly kind: "gone"; readonly error: KvError };

/** Options of `RegistrationMatcher`. */
export interface RegistrationMatcherOptions {
  readonly clock: Clock;
  readonly requests: ProducedRequests;
  /**
   * How long a registration waits for its prompt, in milliseconds: of a vLLM consumer, and of one
   * of our own.
   */
  readonly waitMs: { readonly plain: number; readonly own: number };
  /** Called from the timer when a registration has waited for so long, after it was removed. */
  onExpired(key: string, registration: Registration): void;
}

/** A registration and its key, see `registrationKey`. */
export type KeyedRegistration = readonly [key: string, registration: Registration];

/**
 * Identifies the consumer request that a registration is part of. All ranks of one of our consumers
 * share it, and only they know the secret in it: what a stranger sends about the same request is
 * another registration.
 */
export function consumerRequestKey({ engineId, wireId, own }: Registration): string {
  return JSON.stringify([engineId, wireId, own?.incarnation, own?.generation, own?.secret]);
}

/**
 * Identifies the registration of one consumer rank. The ranks of a vLLM consumer all send the same,
 * which covers the whole engine.
 */
export function registrationKey(registration: Registration): string {
  return `${consumerRequestKey(registration)} ${registration.own?.rank ?? "all"}`;
}

/**
 * Matches registrations with the producer's requests, whichever comes first, and keeps the
 * registrations that wait for a prompt. One of our consumers that has the producer's parameters
 * names the exact request and generation. Otherwise the transfer ids are compared, which a front
 * end gives to both legs. Where one of the two has none, the request ids are: exactly first, then
 * without the suffixes that the two engines appended (vLLM 0.33, `get_base_request_id`).
 */
export class RegistrationMatcher {
  readonly #options: RegistrationMatcherOptions;
  readonly #requests: ProducedRequests;
  readonly #waiting = new Map<
    string,
    { readonly registration: Registration; readonly timer: Timer }
  >();
  readonly #keysByName = new AliasIndex<string>();
  /** The keys of each consumer engine, the oldest first, and what its registrations hold. */
  readonly #byEngine = new Map<string, { readonly keys: Set<string>; bytes: number }>();
  #bytes = 0;

  constructor(options: RegistrationMatcherOptions) {
    this.#options = options;
    this.#requests = options.requests;
  }

  /**
   * Finds the finished request of a registration. `incarnation` is this producer's process;
   * undefined before its first step.
   */
  find(registration: Registration, incarnation: string | undefined): Match {
    const prefill = registration.own?.prefill;
    if (prefill !== undefined) {
      if (incarnation === undefined) return { kind: "wait" };
      if (prefill.incarnation !== incarnation) {
        return gone("the prefill worker has restarted since it computed the prompt");
      }
      const request = this.#requests.byWireId(prefill.wireId);
      if (request !== undefined && request.generation === prefill.generation) {
        return holdsCapability(prefill, request)
          ? claim(request, registration)
          : gone("the registration does not have the capability of that request");
      }
      return prefill.generation > this.#requests.latestGeneration
        ? { kind: "wait" }
        : gone("the prefill worker no longer keeps the blocks of that request");
    }
    const baseId = baseRequestId(registration.matchId);
    const { transferId } = registration;
    const named = transferId === undefined ? [] : [...this.#requests.byTransferId(transferId)];
    const exact = this.#requests.byRequestId(registration.matchId);
    const byId = exact === undefined ? this.#requests.byBaseId(baseId) : [exact];
    let running = false;
    let taken = false;
    let mismatch: KvError | undefined;
    for (const request of named.length > 0 ? named : byId) {
      if (!names(registration, request)) continue;
      if (!mayMean(registration, request)) {
        mismatch ??= promptMismatch(registration, request);
        continue;
      }
      const match = claim(request, registration);
      if (match.kind === "matched") return match;
      running ||= match.kind === "wait";
      taken ||= match.kind === "gone";
    }
    if (running) return { kind: "wait" };
    if (mismatch !== undefined) return { kind: "gone", error: mismatch };
    return taken || this.#requests.hasEnded(baseId, transferId)
      ? gone("the request with that id has ended at the prefill worker")
      : { kind: "wait" };
  }

  /**
   * Keeps a registration until its prompt arrives, for `waitMs` at most. Returns those that have
   * lost their room to it: the oldest of the engine whose registrations hold most, which may be its
   * own.
   */
  wait(key: string, registration: Registration): readonly KeyedRegistration[] {
    const { clock, waitMs, onExpired } = this.#options;
    const timer = clock.setTimer(
      () => {
        this.delete(key);
        onExpired(key, registration);
      },
      registration.own === undefined ? waitMs.plain : waitMs.own,
    );
    this.#waiting.set(key, { registration, timer });
    for (const name of namesOf(registration)) this.#keysByName.add(name, key);
    const engine = this.#byEngine.get(registration.engineId) ?? { keys: new Set(), bytes: 0 };
    this.#byEngine.set(registration.engineId, engine);
    engine.keys.add(key);
    const bytes = bytesOf(registration);
    engine.bytes += bytes;
    this.#bytes += bytes;
    const lost: KeyedRegistration[] = [];
    while (this.#waiting.size > MAX_WAITING || this.#bytes > MAX_WAITING_BYTES) {
      let largest = engine;
      for (const other of this.#byEngine.values()) if (other.bytes > largest.bytes) largest = other;
      const [oldest = key] = largest.keys;
      const gone = this.#waiting.get(oldest)?.registration;
      if (gone === undefined) break;
      lost.push([oldest, gone]);
      this.delete(oldest);
    }
    return lost;
  }

  isWaiting(key: string): boolean {
    return this.#waiting.has(key);
  }

  /** Removes a waiting registration. Does nothing if none waits under this key. */
  delete(key: string): void {
    const waiting = this.#waiting.get(key);
    if (waiting === undefined) return;
    waiting.timer.cancel();
    this.#waiting.delete(key);
    for (const name of namesOf(waiting.registration)) this.#keysByName.delete(name, key);
    const { engineId } = waiting.registration;
    const engine = this.#byEngine.get(engineId);
    const bytes = bytesOf(waiting.registration);
    this.#bytes -= bytes;
    if (engine === undefined) return;
    engine.keys.delete(key);
    engine.bytes -= bytes;
    if (engine.keys.size === 0) this.#byEngine.delete(engineId);
  }

  /**
   * The waiting registrations of our own peers that a running request may be written to before it
   * ends. They keep waiting.
   */
  waitingFor(request: ProducedRequest): readonly KeyedRegistration[] {
    return this.#candidates(request).filter(
      ([, { own, blockIds }]) =>
        own !== undefined && blockIds.length > 0 && isWholePrompt(own, request.order),
    );
  }

  /**
   * Removes and returns the waiting registrations that a finished request goes to. They are all of
   * one consumer request.
   */
  takeFor(request: ProducedRequest): readonly KeyedRegistration[] {
    const candidates = this.#candidates(request);
    const first = candidates[0];
    if (first === undefined) return [];
    const consumer = request.progress?.consumer ?? consumerRequestKey(first[1]);
    return this.#take(candidates.filter(([, other]) => consumerRequestKey(other) === consumer));
  }

  /**
   * Removes and returns the waiting registrations that name a finished request, and want the KV of
   * another prompt.
   */
  takeMismatched(
    request: ProducedRequest,
  ): readonly (readonly [...KeyedRegistration, error: KvError])[] {
    const baseId = baseRequestId(request.requestId);
    // A request of the same id may still finish with that prompt.
    const isOnlyOne = [...this.#requests.byBaseId(baseId)].every(
      ({ finished }) => finished !== undefined,
    );
    const keys = new Set([
      ...this.#keysByName.get(exactName(request.wireId)),
      ...this.#keysByName.get(transferName(request.transferId)),
      ...(isOnlyOne ? this.#keysByName.get(baseId) : []),
    ]);
    const taken = [...keys].flatMap((key) => {
      const registration = this.#waiting.get(key)?.registration;
      if (registration === undefined || !names(registration, request)) return [];
      if (mayMean(registration, request)) return [];
      return [[key, registration, promptMismatch(registration, request)] as const];
    });
    return this.#take(taken);
  }

  /**
   * Removes and returns the waiting registrations that name a request that has failed. Later ones
   * find it ended.
   */
  takeNaming(
    request: Pick<ProducedRequest, "requestId" | "transferId">,
  ): readonly KeyedRegistration[] {
    const { requestId: wireId } = request;
    const taken = this.#candidates({ ...request, wireId, generation: -1, finished: undefined });
    for (const [key] of taken) this.delete(key);
    this.#requests.rememberEnded(request);
    return taken;
  }

  get size(): number {
    return this.#waiting.size;
  }

  takeAll(): readonly KeyedRegistration[] {
    return this.#take(
      [...this.#waiting].map(([key, { registration }]) => [key, registration] as const),
    );
  }

  #take<T extends readonly [key: string, ...rest: unknown[]]>(taken: readonly T[]): readonly T[] {
    for (const [key] of taken) this.delete(key);
    return taken;
  }

  /**
   * The waiting registrations that may match a request: those that want blocks come first, then
   * equal transfer ids and exact ids, then older ones.
   */
  #candidates(request: RequestIdentity): KeyedRegistration[] {
    const { requestId, wireId, transferId } = request;
    const found = new Map<string, Registration>();
    for (const name of [exactName(wireId), transferName(transferId), baseRequestId(requestId)]) {
      for (const key of this.#keysByName.get(name)) {
        const registration = this.#waiting.get(key)?.registration;
        if (registration !== undefined && mayMean(registration, request))
          found.set(key, registration);
      }
    }
    return [...found].sort(([, a], [, b]) => rankFor(request, a) - rankFor(request, b));
  }
}

/**
 * The registrations that have ended at this producer rank, so that one that arrives late or twice
 * is not served. Each is remembered by its key for a while. Beyond that, each consumer process has
 * a watermark: every message names the oldest generation that the consumer has open, and a
 * generation below it never becomes valid again.
 */
export class EndedRegistrations {
  readonly #keys: ExpiringSet;
  /**
   * The oldest generation that is still valid, by consumer process; the process that was quiet for
   * longest comes first.
   */
  readonly #watermarks = new Map<string, number>();

  constructor({ clock, rememberMs }: { readonly clock: Clock; readonly rememberMs: number }) {
    this.#keys = new ExpiringSet({ clock, ttlMs: rememberMs, maxSize: MAX_KEYS });
  }

  add(key: string): void {
    this.#keys.add(key);
  }

  /** True if the registration with this key has ended and is still remembered. */
  has(key: string): boolean {
    return this.#keys.has(key);
  }

  /**
   * Raises the watermark of the consumer process to the oldest open generation that the
   * registration names. Returns false if the registration's own generation lies below the
   * watermark. A vLLM consumer sends no generation: the result is always true.
   */
  isOpen({ engineId, own }: Registration): boolean {
    if (own === undefined) return true;
    const process = JSON.stringify([engineId, own.incarnation, own.secret]);
    const watermark = Math.max(this.#watermarks.get(process) ?? 0, own.oldestOpen);
    this.#watermarks.delete(process);
    this.#watermarks.set(process, watermark);
    const [oldest] = this.#watermarks.keys();
    if (this.#watermarks.size > MAX_CONSUMERS && oldest !== undefined)
      this.#watermarks.delete(oldest);
    return own.generation >= watermark;
  }
}

/**
 * The names under which a registration waits: the exact request if it names one, else the transfer
 * id and the base id.
 */
function namesOf({ own, matchId, transferId }: Registration): readonly string[] {
  if (own?.prefill !== undefined) return [exactName(own.prefill.wireId)];
  return transferId === undefined
    ? [baseRequestId(matchId)]
    : [transferName(transferId), baseRequestId(matchId)];
}

/** No registration waits under the empty name. */
function transferName(transferId: string | undefined): string {
  return transferId === undefined ? "" : `+${transferId}`;
}

/** The name of a registration that names the request itself. */
function exactName(wireId: string): string {
  return `=${wireId}`;
}

/** Orders the registrations that may match a request; the lowest comes first. */
function rankFor({ requestId, transferId }: RequestIdentity, registration: Registration): number {
  const { blockIds, matchId, transferId: named } = registration;
  const isExact = matchId === requestId || (named !== undefined && named === transferId);
  return (blockIds.length === 0 ? 2 : 0) + (isExact ? 0 : 1);
}

/** A finished request goes to one consumer request, and to all ranks of it. */
function claim(request: ProducedRequest, registration: Registration): Match {
  const { finished } = request;
  if (finished === undefined) return { kind: "wait" };
  const { own, blockIds } = registration;
  // A registration of no blocks frees P's blocks, and gets no KV.
  if (own !== undefined && blockIds.length > 0 && !isStartOfPrompt(own, finished))
    return { kind: "gone", error: promptMismatch(registration, request) };
  const consumer = request.progress?.consumer;
  if (consumer === undefined || consumer === consumerRequestKey(registration))
    return { kind: "matched", request };
  return gone("its blocks were given to another decode request");
}

function gone(reason: string): Match {
  return { kind: "gone", error: new KvError("KV_GENERATION_STALE", reason) };
}

type RequestIdentity = Pick<ProducedRequest, "requestId" | "wireId" | "generation" | "finished"> &
  Pick<Partial<ProducedRequest>, "capability" | "transferId">;

/** Whether a registration names the request, and wants the KV of its prompt once that is known. */
function mayMean(registration: Registration, request: RequestIdentity): boolean {
  if (!names(registration, request)) return false;
  const { own, blockIds } = registration;
  const { finished } = request;
  if (own === undefined || finished === undefined) return true;
  // A client may send two prompts under one id.
  if (own.prefill === undefined) return isWholePrompt(own, finished);
  return blockIds.length === 0 || isStartOfPrompt(own, finished);
}

/**
 * Whether a registration names the request: by P's parameters, without them by its transfer id, and
 * where one of the two has none by its id.
 */
function names(registration: Registration, request: RequestIdentity): boolean {
  const { own, matchId, transferId } = registration;
  const { requestId, wireId, generation } = request;
  const prefill = own?.prefill;
  if (prefill === undefined) {
    if (transferId !== undefined && request.transferId !== undefined)
      return transferId === request.transferId;
    return matchId === requestId || baseRequestId(matchId) === baseRequestId(requestId);
  }
  return (
    prefill.wireId === wireId &&
    prefill.generation === generation &&
    holdsCapability(prefill, request)
  );
}

/** The last digest of each prompt. All ranks of a D want the same one. */
const lastDigests = new WeakMap<
  EncodedPrompt,
  { readonly numTokens: number; readonly digest: string | undefined }
>();

/**
 * Whether P's prompt begins with the tokens that D wants, and has the same content key. False where
 * one of the engines does not know its tokens.
 */
function isStartOfPrompt(
  { numTokens, promptDigest: digest }: RegistrationExtension,
  { prompt }: Pick<SendableRequest, "prompt">,
): boolean {
  if (digest === undefined || prompt === undefined) return false;
  let last = lastDigests.get(prompt);
  if (last?.numTokens !== numTokens) {
    last = { numTokens, digest: promptDigest(decodePrompt(prompt), numTokens) };
    lastDigests.set(prompt, last);
  }
  return last.digest === digest;
}

function isWholePrompt(own: RegistrationExtension, order: SendableRequest): boolean {
  return own.numTokens === order.numTokens && isStartOfPrompt(own, order);
}

function promptMismatch(
  { own }: Registration,
  { finished }: Pick<ProducedRequest, "finished">,
): KvError {
  const [wanted, computed] = [own?.numTokens, finished?.numTokens];
  const what =
    wanted === computed
      ? "their tokens, or what else decides their KV, differ"
      : "their lengths differ";
  return new KvError(
    "KV_PROMPT_MISMATCH",
    `the decode worker's prompt of ${wanted} tokens is not the prefill worker's of ${computed}: ${what}`,
    {
      hint: "send the decode worker the prompt of the prefill request, with the same model, LoRA adapter, cache salt and images",
    },
  );
}

/** Whether the registration comes from a D that has the request's parameters. */
function holdsCapability(
  prefill: Pick<RemoteLease, "capability">,
  { capability }: Pick<RequestIdentity, "capability">,
): boolean {
  if (capability === undefined || prefill.capability === undefined)
    return capability === prefill.capability;
  return sameCapability(capability, prefill.capability);
}

function bytesOf({ blockIds, own }: Registration): number {
  const ids = blockIds.reduce((sum, { length }) => sum + length, own?.computedBlocks.length ?? 0);
  return REGISTRATION_BYTES + BLOCK_ID_BYTES * ids;
}
