import { ExpiringSet, type LeaseOrder, type SendableRequest } from "@kv/connector/building-blocks";
import type { Clock } from "@kv/interface";
import { baseRequestId } from "@kv/protocol";

/** A request of this producer, from the step that runs it until its blocks are freed. */
export interface ProducedRequest {
  readonly requestId: string;
  /** The id that consumers use, see `Generations`. */
  readonly wireId: string;
  /** The use of the request's blocks. It grows with every use and is never assigned again. */
  readonly generation: number;
  /** Who holds it may act on the request; see `Generation`. */
  readonly capability: string | undefined;
  /** `transfer_id` of its parameters; undefined where they have none. */
  readonly transferId?: string | undefined;
  /** Whether a consumer has proved that it holds the request's parameters. */
  isProven: boolean;
  /**
   * The latest order of the scheduler side. It changes when the request is preempted and runs again
   * with other blocks.
   */
  order: SendableRequest;
  finished: LeaseOrder | undefined;
  /** The consumer request that receives the KV: the first that matched. Undefined until then. */
  progress: WriteProgress | undefined;
}

/** How much of a finished request its consumer has received from this rank. */
export interface WriteProgress {
  /** The consumer request, see `consumerRequestKey`. */
  readonly consumer: string;
  readonly ranks: readonly number[];
  /** The ranks that are finished: their share was written, has failed, or was not wanted. */
  readonly servedRanks: Set<number>;
  writing: number;
}

const MAX_REMEMBERED = 65_536;

/** The requests of this producer rank, by each name that a peer may use. */
export class ProducedRequests {
  readonly #byWireId = new Map<string, ProducedRequest>();
  readonly #byRequestId = new Map<string, ProducedRequest>();
  /** By base id, transfer id and alias. */
  readonly #byName = new AliasIndex<ProducedRequest>();
  readonly #ended: EndedNames;
  #latestGeneration = 0;

  /** `rememberMs`: how long the base id and the transfer id of an ended request are remembered. */
  constructor({ clock, rememberMs }: { readonly clock: Clock; readonly rememberMs: number }) {
    this.#ended = new EndedNames({ clock, ttlMs: rememberMs, maxSize: MAX_REMEMBERED });
  }

  /** Adds a request that runs, or updates it when it runs again after a preemption. */
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
    for (const name of namesOf(request)) this.#byName.add(name, request);
    return request;
  }

  /** Records that the forward pass of a request has finished; its blocks can be written now. */
  finish(order: LeaseOrder): ProducedRequest {
    const request = this.admit(order);
    request.finished = order;
    return request;
  }

  /**
   * Removes a request and remembers its base id. Does nothing if the request was removed before.
   */
  end(request: ProducedRequest): void {
    const { requestId, wireId } = request;
    if (!this.#byWireId.delete(wireId)) return;
    this.#byRequestId.delete(requestId);
    for (const name of namesOf(request)) this.#byName.delete(name, request);
    this.rememberEnded(request);
  }

  /**
   * Remembers a request as ended that may never have been admitted, so that a registration that
   * comes later is refused at once.
   */
  rememberEnded({
    requestId,
    transferId,
  }: Pick<ProducedRequest, "requestId" | "transferId">): void {
    this.#ended.add(baseRequestId(requestId), transferId);
  }

  /**
   * True if one with this transfer id, or where one of the two has none with this base id, has
   * ended within `rememberMs`.
   */
  hasEnded(baseId: string, transferId: string | undefined): boolean {
    return this.#ended.has(baseId, transferId);
  }

  /** True until `end`: the request has not ended, and no later use of its id has replaced it. */
  isCurrent(request: ProducedRequest): boolean {
    return this.#byWireId.get(request.wireId) === request;
  }

  byWireId(wireId: string): ProducedRequest | undefined {
    return this.#byWireId.get(wireId);
  }

  byRequestId(requestId: string): ProducedRequest | undefined {
    return this.#byRequestId.get(requestId);
  }

  byBaseId(baseId: string): Iterable<ProducedRequest> {
    return this.#byName.get(`base ${baseId}`);
  }

  byTransferId(transferId: string): Iterable<ProducedRequest> {
    return this.#byName.get(`transfer ${transferId}`);
  }

  byAlias(name: string): Iterable<ProducedRequest> {
    return this.#byName.get(`alias ${name}`);
  }

  /**
   * The greatest generation that was admitted. The scheduler side sends generations in the order in
   * which they begin.
   */
  get latestGeneration(): number {
    return this.#latestGeneration;
  }

  get size(): number {
    return this.#byWireId.size;
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

function namesOf({ requestId, wireId, transferId }: ProducedRequest): Set<string> {
  const aliases = [wireId, ...requestAliases(requestId)];
  const names = new Set([`base ${baseRequestId(requestId)}`]);
  if (transferId !== undefined) names.add(`transfer ${transferId}`);
  for (const alias of aliases) names.add(`alias ${alias}`);
  return names;
}

/** Finds values by a name that several of them may share. */
export class AliasIndex<T extends string | object> {
  /** The value of a name, or the set of its values: most names have one. */
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

  /** The values under a name, in the order in which they were added. */
  get(name: string): Iterable<T> {
    const values = this.#byName.get(name);
    if (values === undefined) return [];
    return values instanceof Set ? values : [values];
  }

  clear(): void {
    this.#byName.clear();
  }
}

/**
 * The names that a peer may use for a producer's request, besides its own id. The first is the id
 * without the suffix of eight hex digits that vLLM appends to each request id, so both legs of a
 * client's request share it. The second is the id that the proxy chose: vLLM turns an
 * `X-Request-Id` into `cmpl-{id}-{index}-{suffix}`, and the heartbeats of a vLLM 0.33 push consumer
 * carry the proxy's id.
 */
function requestAliases(requestId: string): readonly string[] {
  const base = baseRequestId(requestId);
  const proxy = /^(?:cmpl|chatcmpl)-(.+?)(?:-\d+)?$/.exec(base)?.[1];
  return proxy === undefined ? [base] : [base, proxy];
}

/** The names of requests that have ended. */
class EndedNames {
  readonly #ids: ExpiringSet;
  readonly #names: ExpiringSet;

  constructor(options: {
    readonly clock: Clock;
    readonly ttlMs: number;
    readonly maxSize: number;
  }) {
    this.#ids = new ExpiringSet(options);
    this.#names = new ExpiringSet(options);
  }

  add(baseId: string, transferId: string | undefined): void {
    if (transferId === undefined) this.#ids.add(baseId);
    else for (const name of [`id ${baseId}`, `transfer ${transferId}`]) this.#names.add(name);
  }

  /**
   * Whether one with this transfer id has ended, or where one of the two has none, with this base
   * id.
   */
  has(baseId: string, transferId: string | undefined): boolean {
    const name = transferId === undefined ? `id ${baseId}` : `transfer ${transferId}`;
    return this.#ids.has(baseId) || this.#names.has(name);
  }

  clear(): void {
    this.#ids.clear();
    this.#names.clear();
  }
}
