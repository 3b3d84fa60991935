import { ExpiringSet, type LeaseOrder, type SendableRequest } from "@kv/connector/building-blocks";
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

/** Messages in flight arrive within it. */
const REMEMBER_MS = 600_000;
const MAX_REMEMBERED = 65_536;
/** Room for 13,000 prompts of 10,000 tokens in blocks of 16. */
export const MAX_WAITING_BYTES = 64 * 2 ** 20;
const REGISTRATION_BYTES = 2048;
const BLOCK_ID_BYTES = 8;
const MAX_CONSUMERS = 4096;

interface MemoryOptions {
  readonly clock: Clock;
  readonly rememberMs?: number | undefined;
}

type RequestNames = Pick<
  SendableRequest,
  "requestId" | "wireId" | "generation" | "capability" | "transferId"
>;

/** Kept from the step that runs it until its blocks are freed. */
export interface ProducedRequest extends RequestNames {
  isProven: boolean;
  /** A preempted request runs again with other blocks. */
  order: SendableRequest;
  finished: LeaseOrder | undefined;
  /** Of the D request that gets the KV, the first that matched. */
  progress: WriteProgress | undefined;
}

export interface WriteProgress {
  readonly consumer: string;
  readonly ranks: readonly number[];
  /** Written, failed, or not wanted. */
  readonly servedRanks: Set<number>;
  writing: number;
}

/** This P rank's requests, by each name that a peer may use. */
export class ProducedRequests {
  readonly #byWireId = new Map<string, ProducedRequest>();
  readonly #byRequestId = new Map<string, ProducedRequest>();
  readonly #byName = new AliasIndex<ProducedRequest>();
  readonly #ended: ExpiringSet;
  #latestGeneration = 0;

  constructor({ clock, rememberMs: ttlMs = REMEMBER_MS }: MemoryOptions) {
    this.#ended = new ExpiringSet({ clock, ttlMs, maxSize: 2 * MAX_REMEMBERED });
  }

  admit(order: SendableRequest): ProducedRequest {
    const known = this.#byWireId.get(order.wireId);
    if (known !== undefined) {
      known.order = order;
      return known;
    }
    const { requestId, wireId, generation, capability, transferId } = order;
    const request: ProducedRequest = {
      requestId,
      wireId,
      generation,
      capability,
      transferId,
      isProven: false,
      order,
      finished: undefined,
      progress: undefined,
    };
    this.#latestGeneration = Math.max(this.#latestGeneration, generation);
    this.#byWireId.set(wireId, request);
    this.#byRequestId.set(requestId, request);
    for (const name of namesOfRequest(request)) this.#byName.add(name, request);
    return request;
  }

  /** The forward pass has finished: the blocks can be written. */
  finish(order: LeaseOrder): ProducedRequest {
    const request = this.admit(order);
    request.finished = order;
    return request;
  }

  end(request: ProducedRequest): void {
    const { requestId, wireId } = request;
    if (!this.#byWireId.delete(wireId)) return;
    this.#byRequestId.delete(requestId);
    for (const name of namesOfRequest(request)) this.#byName.delete(name, request);
    this.rememberEnded(request);
  }

  /** Lets a registration of a request that was perhaps never admitted be refused at once. */
  rememberEnded({ requestId, transferId }: Pick<RequestNames, "requestId" | "transferId">): void {
    const baseId = baseRequestId(requestId);
    const names =
      transferId === undefined
        ? [`any ${baseId}`]
        : [endedName(baseId, undefined), endedName(baseId, transferId)];
    for (const name of names) this.#ended.add(name);
  }

  /** Compares transfer ids, or base ids where one of the two has no transfer id. */
  hasEnded(baseId: string, transferId: string | undefined): boolean {
    return this.#ended.has(`any ${baseId}`) || this.#ended.has(endedName(baseId, transferId));
  }

  /** The request has not ended, and no later use of its id replaced it. */
  isCurrent(request: ProducedRequest): boolean {
    return this.#byWireId.get(request.wireId) === request;
  }

  byWireId(wireId: string): ProducedRequest | undefined {
    return this.#byWireId.get(wireId);
  }

  byRequestId(requestId: string): ProducedRequest | undefined {
    return this.#byRequestId.get(requestId);
  }

  byName(kind: "base" | "transfer" | "alias", name: string): Iterable<ProducedRequest> {
    return this.#byName.get(`${kind} ${name}`);
  }

  /** Generations are admitted in ascending order. */
  get latestGeneration(): number {
    return this.#latestGeneration;
  }

  get size(): number {
    return this.#byWireId.size;
  }

  get names(): number {
    return this.#byRequestId.size + this.#byName.size;
  }

  [Symbol.iterator](): Iterator<ProducedRequest> {
    return this.#byWireId.values();
  }

  clear(): void {
    this.#byWireId.clear();
    this.#byRequestId.clear();
    this.#byName.clear();
    this.#ended.clear();
  }
}

function endedName(baseId: string, transferId: string | undefined): string {
  return transferId === undefined ? `id ${baseId}` : `transfer ${transferId}`;
}

/**
 * The base id lacks the eight hex digits that vLLM appends, so both legs of a client's request
 * share it. vLLM turns an `X-Request-Id` into `cmpl-{id}-{index}-{suffix}`, and a vLLM 0.33 push
 * D's heartbeats carry the proxy's id.
 */
function namesOfRequest({ requestId, wireId, transferId }: RequestNames): Set<string> {
  const base = baseRequestId(requestId);
  const proxy = /^(?:cmpl|chatcmpl)-(.+?)(?:-\d+)?$/.exec(base)?.[1];
  const names = new Set([`base ${base}`, `alias ${wireId}`, `alias ${base}`]);
  if (transferId !== undefined) names.add(`transfer ${transferId}`);
  if (proxy !== undefined) names.add(`alias ${proxy}`);
  return names;
}

/** Several values may share a name. */
class AliasIndex<T extends string | object> {
  readonly #byName = new Map<string, T | Set<T>>();

  add(name: string, value: T): void {
    const values = this.#byName.get(name);
    if (values instanceof Set) values.add(value);
    else this.#byName.set(name, values === undefined ? value : new Set([values, value]));
  }

  delete(name: string, value: T): void {
    const values = this.#byName.get(name);
    if (values instanceof Set) values.delete(value);
    if (values === value || (values instanceof Set && values.size === 0)) this.#byName.delete(name);
  }

  get(name: string): Iterable<T> {
    const values = this.#byName.get(name);
    if (values === undefined) return [];
    return values instanceof Set ? values : [values];
  }

  get size(): number {
    return this.#byName.size;
  }

  clear(): void {
    this.#byName.clear();
  }
}

/** A registration's request, why it has none, or undefined while it waits. */
export type Match = ProducedRequest | KvError | undefined;

export interface RegistrationMatcherOptions {
  readonly clock: Clock;
  readonly requests: ProducedRequests;
  readonly waitMs: { readonly plain: number; readonly own: number };
  onExpired(key: string, registration: Registration): void;
}

interface WaitingEngine {
  readonly keys: Set<string>;
  bytes: number;
}

interface WaitingRegistration {
  readonly registration: Registration;
  readonly timer: Timer;
  readonly engine: WaitingEngine;
  readonly bytes: number;
}

export type KeyedRegistration = readonly [key: string, registration: Registration];

type RefusedRegistration = readonly [...KeyedRegistration, error: KvError];

/**
 * All ranks of an `@kv` D share it. It contains their secret, so a stranger's message is another
 * registration.
 */
export function consumerRequestKey({ engineId, wireId, own }: Registration): string {
  return JSON.stringify([engineId, wireId, own?.incarnation, own?.generation, own?.secret]);
}

/** All ranks of a vLLM D send the same registration. */
export function registrationKey(registration: Registration): string {
  return `${consumerRequestKey(registration)} ${registration.own?.rank ?? "all"}`;
}

/**
 * Matches registrations with requests, whichever comes first. An `@kv` D with P's parameters names
 * the exact request and generation. Otherwise transfer ids are compared or, where one is missing,
 * request ids: exactly, then without the suffixes of both engines (vLLM 0.33,
 * `get_base_request_id`).
 */
export class RegistrationMatcher {
  readonly #options: RegistrationMatcherOptions;
  readonly #requests: ProducedRequests;
  readonly #waiting = new Map<string, WaitingRegistration>();
  readonly #keysByName = new AliasIndex<string>();
  readonly #byEngine = new Map<string, WaitingEngine>();
  #bytes = 0;

  constructor(options: RegistrationMatcherOptions) {
    this.#options = options;
    this.#requests = options.requests;
  }

  /** `incarnation`: this P's process; undefined before its first step. */
  find(registration: Registration, incarnation: string | undefined): Match {
    const { matchId, own, transferId } = registration;
    if (own?.prefill !== undefined) {
      const { prefill } = own;
      if (incarnation === undefined) return undefined;
      if (prefill.incarnation !== incarnation)
        return gone("the prefill worker has restarted since it computed the prompt");
      const request = this.#requests.byWireId(prefill.wireId);
      if (request?.generation === prefill.generation) {
        return holdsCapability(prefill, request)
          ? claim(request, registration)
          : gone("the registration does not have the capability of that request");
      }
      return prefill.generation > this.#requests.latestGeneration
        ? undefined
        : gone("the prefill worker no longer keeps the blocks of that request");
    }
    const baseId = baseRequestId(matchId);
    const named =
      transferId === undefined ? [] : [...this.#requests.byName("transfer", transferId)];
    const exact = this.#requests.byRequestId(matchId);
    const byId = exact === undefined ? this.#requests.byName("base", baseId) : [exact];
    let isRunning = false;
    let isTaken = false;
    let mismatch: KvError | undefined;
    for (const request of named.length > 0 ? named : byId) {
      if (!names(registration, request)) continue;
      if (!mayMean(registration, request)) {
        mismatch ??= promptMismatch(registration, request);
        continue;
      }
      const match = claim(request, registration);
      if (match === undefined) isRunning = true;
      else if (KvError.is(match)) isTaken = true;
      else return match;
    }
    if (isRunning) return undefined;
    if (mismatch !== undefined) return mismatch;
    return isTaken || this.#requests.hasEnded(baseId, transferId)
      ? gone("the request with that id has ended at the prefill worker")
      : undefined;
  }

  /**
   * Keeps a registration until its prompt arrives. Returns what had to make room: the oldest of the
   * engine with the most.
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
    const engine = this.#byEngine.get(registration.engineId) ?? { keys: new Set(), bytes: 0 };
    this.#byEngine.set(registration.engineId, engine);
    const bytes = bytesOf(registration);
    this.#waiting.set(key, { registration, timer, engine, bytes });
    for (const name of namesOf(registration)) this.#keysByName.add(name, key);
    engine.keys.add(key);
    engine.bytes += bytes;
    this.#bytes += bytes;
    const lost: KeyedRegistration[] = [];
    while (this.#bytes > MAX_WAITING_BYTES) {
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

  /** The first step tells this process's incarnation. Takes registrations that name another. */
  takeOfOthers(incarnation: string): readonly RefusedRegistration[] {
    const others = [...this.#waiting].flatMap(([key, { registration }]) => {
      const match = this.find(registration, incarnation);
      return KvError.is(match) ? [[key, registration, match] as const] : [];
    });
    return this.#take(others);
  }

  isWaiting(key: string): boolean {
    return this.#waiting.has(key);
  }

  delete(key: string): void {
    const waiting = this.#waiting.get(key);
    if (waiting === undefined) return;
    const { registration, timer, engine, bytes } = waiting;
    timer.cancel();
    this.#waiting.delete(key);
    for (const name of namesOf(registration)) this.#keysByName.delete(name, key);
    this.#bytes -= bytes;
    engine.bytes -= bytes;
    engine.keys.delete(key);
    if (engine.keys.size === 0) this.#byEngine.delete(registration.engineId);
  }

  /** Registrations of `@kv` peers for a running request. They keep waiting. */
  waitingFor(request: ProducedRequest): readonly KeyedRegistration[] {
    return this.#candidates(request).filter(
      ([, { own, blockIds }]) =>
        own !== undefined && blockIds.length > 0 && isWholePrompt(own, request.order),
    );
  }

  /** Takes all registrations of the D request that gets a finished request. */
  takeFor(request: ProducedRequest): readonly KeyedRegistration[] {
    const candidates = this.#candidates(request);
    const first = candidates[0];
    if (first === undefined) return [];
    const consumer = request.progress?.consumer ?? consumerRequestKey(first[1]);
    return this.#take(candidates.filter(([, other]) => consumerRequestKey(other) === consumer));
  }

  /** Takes registrations that name a finished request but want another prompt. */
  takeMismatched(request: ProducedRequest): readonly RefusedRegistration[] {
    const baseId = baseRequestId(request.requestId);
    // A request of the same id may still finish with that prompt.
    const isOnlyOne = [...this.#requests.byName("base", baseId)].every(
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

  /** Takes registrations of a failed request. Later ones find it ended. */
  takeNaming(
    request: Pick<RequestNames, "requestId" | "transferId">,
  ): readonly KeyedRegistration[] {
    this.#requests.rememberEnded(request);
    const { requestId: wireId } = request;
    const named = { ...request, wireId, generation: -1, finished: undefined };
    return this.#take(this.#candidates(named));
  }

  get size(): number {
    return this.#waiting.size;
  }

  /** Estimated for all that wait. */
  get bytes(): number {
    return this.#bytes;
  }

  /** Names of those that wait, and engines that have sent them. */
  get names(): number {
    return this.#keysByName.size + this.#byEngine.size;
  }

  takeAll(): readonly KeyedRegistration[] {
    const all = [...this.#waiting].map(([key, { registration }]) => [key, registration] as const);
    return this.#take(all);
  }

  #take<T extends readonly [key: string, ...rest: unknown[]]>(taken: readonly T[]): readonly T[] {
    for (const [key] of taken) this.delete(key);
    return taken;
  }

  /** First those that want blocks, then equal transfer ids and exact ids, then older ones. */
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
 * Keeps late or repeated registrations from being served. Ended ones are remembered for a while.
 * Afterwards a watermark per D process decides: every message names the oldest open generation.
 */
export class EndedRegistrations {
  readonly #keys: ExpiringSet;
  readonly #watermarks = new Map<string, number>();

  constructor({ clock, rememberMs: ttlMs = REMEMBER_MS }: MemoryOptions) {
    this.#keys = new ExpiringSet({ clock, ttlMs, maxSize: MAX_REMEMBERED });
  }

  add(key: string): void {
    this.#keys.add(key);
  }

  has(key: string): boolean {
    return this.#keys.has(key);
  }

  /**
   * Raises the watermark; false if the registration's generation is below it. vLLM sends neither.
   * Without blocks nothing is written, and D's ranks send in any order: a release counts as open.
   */
  isOpen({ engineId, own, blockIds }: Registration): boolean {
    if (own === undefined) return true;
    const process = JSON.stringify([engineId, own.incarnation, own.secret]);
    const watermark = Math.max(this.#watermarks.get(process) ?? 0, own.oldestOpen);
    this.#watermarks.delete(process);
    this.#watermarks.set(process, watermark);
    const [oldest] = this.#watermarks.keys();
    if (this.#watermarks.size > MAX_CONSUMERS && oldest !== undefined)
      this.#watermarks.delete(oldest);
    return blockIds.length === 0 || own.generation >= watermark;
  }
}

/** The exact request if named, else the transfer id and the base id. */
function namesOf({ own, matchId, transferId }: Registration): readonly string[] {
  if (own?.prefill !== undefined) return [exactName(own.prefill.wireId)];
  return transferId === undefined
    ? [baseRequestId(matchId)]
    : [transferName(transferId), baseRequestId(matchId)];
}

/** No registration has the empty name. */
function transferName(transferId: string | undefined): string {
  return transferId === undefined ? "" : `+${transferId}`;
}

function exactName(wireId: string): string {
  return `=${wireId}`;
}

/** The lowest is matched first. */
function rankFor({ requestId, transferId }: RequestIdentity, registration: Registration): number {
  const { blockIds, matchId, transferId: named } = registration;
  const isExact = matchId === requestId || (named !== undefined && named === transferId);
  return (blockIds.length === 0 ? 2 : 0) + (isExact ? 0 : 1);
}

/** A finished request goes to all ranks of one D request. */
function claim(request: ProducedRequest, registration: Registration): Match {
  const { finished } = request;
  if (finished === undefined) return undefined;
  const { own, blockIds } = registration;
  // Without blocks, a registration frees P's blocks and gets no KV.
  if (own !== undefined && blockIds.length > 0 && !isStartOfPrompt(own, finished))
    return promptMismatch(registration, request);
  const key = consumerRequestKey(registration);
  const { consumer = key } = request.progress ?? {};
  return consumer === key ? request : gone("its blocks were given to another decode request");
}

function gone(reason: string): KvError {
  return new KvError("KV_GENERATION_STALE", reason);
}

type RequestIdentity = RequestNames & Pick<ProducedRequest, "finished">;

/** Compares names, and the prompts once they are known. */
function mayMean(registration: Registration, request: RequestIdentity): boolean {
  if (!names(registration, request)) return false;
  const { own, blockIds } = registration;
  const { finished } = request;
  if (own === undefined || finished === undefined) return true;
  // A client may send two prompts under one id.
  if (own.prefill === undefined) return isWholePrompt(own, finished);
  return blockIds.length === 0 || isStartOfPrompt(own, finished);
}

/** Compares P's parameters, else transfer ids, else request ids. */
function names(registration: Registration, request: RequestIdentity): boolean {
  const { own, matchId, transferId } = registration;
  const { requestId, wireId, generation } = request;
  const prefill = own?.prefill;
  if (prefill === undefined) {
    if (transferId !== undefined && request.transferId !== undefined)
      return transferId === request.transferId;
    return baseRequestId(matchId) === baseRequestId(requestId);
  }
  return (
    prefill.wireId === wireId &&
    prefill.generation === generation &&
    holdsCapability(prefill, request)
  );
}

/** All ranks of a D want the same one. */
const lastDigests = new WeakMap<
  EncodedPrompt,
  { readonly numTokens: number; readonly digest: string | undefined }
>();

/** False where one of the engines does not know its tokens. */
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

function promptMismatch({ own }: Registration, { finished }: RequestIdentity): KvError {
  const [wanted, computed] = [own?.numTokens, finished?.numTokens];
  const without = (side: string) => `the ${side} worker's engine handed its connector no token ids`;
  const what =
    finished?.prompt === undefined
      ? without("prefill")
      : own?.promptDigest === undefined
        ? without("decode")
        : wanted === computed
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

function holdsCapability(
  { capability: given }: Pick<RemoteLease, "capability">,
  { capability }: RequestNames,
): boolean {
  if (capability === undefined || given === undefined) return capability === given;
  return sameCapability(capability, given);
}

function bytesOf({ blockIds, own }: Registration): number {
  const ids = blockIds.reduce((sum, { length }) => sum + length, own?.computedBlocks.length ?? 0);
  return REGISTRATION_BYTES + BLOCK_ID_BYTES * ids;
}
