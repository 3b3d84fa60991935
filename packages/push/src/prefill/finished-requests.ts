import {
  type LeaseOrder,
  Leases,
  MessageGuard,
  TaskTracker,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import type { Registration, RequestProof } from "@kv/protocol";
import { handshakeSourceRanks } from "@kv/topology";
import type { EndedNotices } from "./ended-notices.js";
import type { LayerwiseWrites } from "./layerwise-writes.js";
import type { ProducedRequest, ProducedRequests, WriteProgress } from "./produced-requests.js";
import { consumerRequestKey } from "./registrations.js";
import type { DispatchedWrite, WriteDispatcher } from "./write-blocks.js";

/** The parts of P's worker that `FinishedRequests` needs. */
export interface FinishedRequestsOptions {
  readonly context: Pick<
    WorkerContext,
    "clock" | "local" | "log" | "metrics" | "output" | "settings" | "tracer"
  >;
  readonly requests: ProducedRequests;
  readonly endedRegistrations: { add(key: string): void };
  readonly dispatcher: WriteDispatcher;
  /** Undefined without layer-wise push. */
  readonly layerwise: LayerwiseWrites | undefined;
  readonly endedNotices: EndedNotices;
}

/** A request as a heartbeat names it. */
export type NamedRequest = Pick<RequestProof, "requestId"> & Partial<RequestProof>;

/**
 * Keeps the blocks of each finished request under a lease, writes them to the registrations that
 * matched, and returns them to the engine when every rank of the consumer is served, or when the
 * lease expires before a consumer has registered.
 */
export class FinishedRequests {
  readonly #options: FinishedRequestsOptions;
  readonly #guard: MessageGuard;
  readonly #leases: Leases;
  /** The final writes that run or wait, by the key of their registration. */
  readonly #writes = new Map<string, DispatchedWrite>();
  readonly #serving = new TaskTracker();
  /** Requests whose blocks are still read by layer-wise writes. */
  readonly #releasing = new TaskTracker();

  constructor(options: FinishedRequestsOptions) {
    const { clock, log, settings, tracer } = options.context;
    const { extensionMs, requiresKvPeer } = settings;
    this.#options = options;
    this.#guard = new MessageGuard({ requiresKvPeer, log });
    const onExpired = (wireId: string) => this.#leaseExpired(wireId);
    this.#leases = new Leases({ clock, extensionMs, tracer, onExpired });
  }

  grantLease(order: LeaseOrder, schedulerClockMs: number): void {
    this.#leases.grant(order, schedulerClockMs);
  }

  /**
   * Extends the leases of the requests that a heartbeat names, where its sender may. Our own
   * consumers send the wire id and the capability, vLLM's send the proxy's name of the request.
   */
  extendLeases(named: readonly NamedRequest[], from: string): void {
    const { requests } = this.#options;
    for (const { requestId: name, capability } of named) {
      const exact = requests.byWireId(name);
      for (const request of exact === undefined ? requests.byAlias(name) : [exact]) {
        if (this.#guard.mayAct(request, capability, from)) this.#leases.extend([request.wireId]);
      }
    }
  }

  /**
   * Writes a finished request to a registration that matched it, in the queue of the consumer. A
   * registration of no blocks only marks its rank as served.
   * @throws `KV_GENERATION_STALE` if the request has ended; `KV_TOPOLOGY_INVALID`;
   * `KV_REQUEST_INVALID` for a rank that this one does not serve; `KV_INTERNAL` if the request has
   * not finished.
   */
  write(key: string, registration: Registration, request: ProducedRequest): void {
    const { requests, endedRegistrations } = this.#options;
    if (!requests.isCurrent(request)) {
      throw new KvError("KV_GENERATION_STALE", "the request with that id has ended");
    }
    request.progress ??= this.#progressTo(registration);
    const { progress, finished } = request;
    const ranks = registration.own === undefined ? progress.ranks : [registration.own.rank];
    if (!ranks.every((rank) => progress.ranks.includes(rank))) {
      throw new KvError(
        "KV_REQUEST_INVALID",
        `this rank does not serve rank ${ranks} of engine ${registration.engineId}, only ${progress.ranks.join(", ")}`,
      );
    }
    if (registration.blockIds.length === 0) {
      endedRegistrations.add(key);
      this.#served(request, progress, ranks);
      return;
    }
    if (finished === undefined) {
      throw new KvError("KV_INTERNAL", `request ${request.requestId} has not finished`);
    }
    // Regions that layer-wise writes have written: the final write leaves them out.
    const written = new Set<string>();
    const write: DispatchedWrite = {
      registration,
      ranks,
      order: finished,
      includesRegion: (region) => !written.has(region),
      controller: new AbortController(),
    };
    this.#writes.set(key, write);
    progress.writing += 1;
    this.#serving.track(
      this.#serve(key, finished, write, written).then(() => {
        this.#writes.delete(key);
        endedRegistrations.add(key);
        progress.writing -= 1;
        this.#served(request, progress, ranks);
      }),
    );
  }

  /** True while the final write for a registration runs or waits in the queue. */
  isWriting(key: string): boolean {
    return this.#writes.has(key);
  }

  /**
   * Aborts the final write for a registration that the consumer withdrew. False if there is none.
   * The consumer gets its notice when the transport has released the memory.
   */
  withdraw(key: string, reason: KvError): boolean {
    const write = this.#writes.get(key);
    if (write === undefined) return false;
    write.withdrawn = true;
    write.controller.abort(reason);
    return true;
  }

  /**
   * Ends a request and reports it to the engine as sent, when no layer-wise write reads its blocks
   * any more.
   */
  free(request: ProducedRequest): void {
    const { requests, layerwise, context } = this.#options;
    const { output } = context;
    requests.end(request);
    const released = layerwise?.release(request);
    if (released === undefined) output.sent(request.requestId);
    else this.#releasing.track(released.then(() => output.sent(request.requestId)));
  }

  /** The number of leases, and of requests that wait for layer-wise writes to end. */
  outstanding(): { leases: number; releasing: number } {
    return { leases: this.#leases.size, releasing: this.#releasing.size };
  }

  get size(): number {
    return this.#serving.size;
  }

  idle(): Promise<void> {
    return this.#serving.idle();
  }

  /** Ends all leases and aborts all final writes. */
  close(reason = new KvError("KV_AGENT_CLOSED", "the worker was closed")): void {
    this.#leases.close();
    for (const { controller } of this.#writes.values()) controller.abort(reason);
  }

  /**
   * Assigns the request to the consumer of the first registration that matches it.
   * @throws `KV_TOPOLOGY_INVALID`.
   */
  #progressTo(registration: Registration): WriteProgress {
    const ranks = ranksServed(this.#options.context.local, registration);
    return {
      consumer: consumerRequestKey(registration),
      ranks,
      servedRanks: new Set(),
      writing: 0,
    };
  }

  /**
   * Waits for the layer-wise writes, writes the regions that are not in `written`, and sends the
   * ended notice after a failure.
   */
  async #serve(
    key: string,
    order: LeaseOrder,
    write: DispatchedWrite,
    written: Set<string>,
  ): Promise<void> {
    const { layerwise, dispatcher, endedNotices } = this.#options;
    const early = await layerwise?.finish(key, order, write.controller.signal);
    for (const region of early ?? []) written.add(region);
    const error = await dispatcher.write(write);
    if (error !== undefined) endedNotices.send(key, write.registration, error);
  }

  #served(request: ProducedRequest, progress: WriteProgress, ranks: readonly number[]): void {
    for (const rank of ranks) progress.servedRanks.add(rank);
    if (progress.writing > 0 || !this.#options.requests.isCurrent(request)) return;
    const allServed = progress.servedRanks.size === progress.ranks.length;
    // If the lease expired during the write, the request does not wait for further ranks.
    if (allServed || !this.#leases.has(request.wireId)) this.#complete(request);
  }

  #leaseExpired(wireId: string): void {
    const { requests, context } = this.#options;
    const { metrics, log } = context;
    const request = requests.byWireId(wireId);
    if (request === undefined) return;
    // A running WRITE is awaited: its end frees the blocks.
    if ((request.progress?.writing ?? 0) > 0) return;
    metrics.leaseExpired();
    log.warn("lease-expired", {
      requestId: request.requestId,
      ranks: request.progress?.servedRanks.size ?? 0,
    });
    this.#complete(request);
  }

  #complete(request: ProducedRequest): void {
    this.#leases.release(request.wireId);
    this.free(request);
  }
}

/**
 * The consumer ranks that a producer rank serves.
 * @throws `KV_TOPOLOGY_INVALID`.
 */
function ranksServed(
  { tpRank, tpSize, dcpSize }: Pick<RankGeometry, "tpRank" | "tpSize" | "dcpSize">,
  { tpSize: remoteTpSize, own }: Registration,
): number[] {
  return handshakeSourceRanks({
    tpRank,
    tpSize,
    dcpSize,
    remoteTpSize,
    remoteDcpSize: own?.dcpSize,
  });
}
