import {
  idleWithinGrace,
  Leases,
  MessageGuard,
  type RemoteEngines,
  ranksToAsk,
  TaskTracker,
  type WorkerContext,
  type WorkerHalf,
} from "@kv/connector/building-blocks";
import { type ComputedLayer, KvError } from "@kv/interface";
import {
  decodePushControl,
  decodeRegistration,
  decodeRequestControl,
  type KvNotification,
  type Registration,
  type RequestProof,
} from "@kv/protocol";
import { type ConsumerEngine, consumerEngines } from "./prefill/consumer-engine.js";
import { LayerwiseWrites } from "./prefill/layerwise-writes.js";
import {
  consumerRequestKey,
  EndedRegistrations,
  MAX_WAITING_BYTES,
  type ProducedRequest,
  ProducedRequests,
  RegistrationMatcher,
  registrationKey,
  type WriteProgress,
} from "./prefill/registrations.js";
import { type DispatchedWrite, WriteDispatcher } from "./prefill/write-blocks.js";
import type { PushStepMetadata } from "./step-metadata.js";

export type PrefillWorkerStep = Pick<
  PushStepMetadata,
  "schedulerClockMs" | "incarnation" | "inBatch" | "notSent" | "leases" | "lost"
>;

type NamedRequest = Pick<RequestProof, "requestId"> & Partial<RequestProof>;

/**
 * P's half of a worker. Keeps each finished request's blocks under a lease, and writes them to
 * matching registrations. The engine gets them back when every rank of D is served, or when the
 * lease ends first. Events never wait for a handshake or a slow D.
 */
export class PrefillWorker implements WorkerHalf<PrefillWorkerStep> {
  readonly engines: RemoteEngines<ConsumerEngine>;
  readonly #context: WorkerContext;
  readonly #requests: ProducedRequests;
  readonly #endedRegistrations: EndedRegistrations;
  readonly #matcher: RegistrationMatcher;
  readonly #dispatcher: WriteDispatcher;
  readonly #layerwise: LayerwiseWrites | undefined;
  readonly #guard: MessageGuard;
  readonly #leases: Leases;
  readonly #writes = new Map<string, DispatchedWrite>();
  readonly #serving = new TaskTracker();
  readonly #releasing = new TaskTracker();
  readonly #telling = new TaskTracker();
  /** Undefined before the first step. */
  #incarnation: string | undefined;
  #closed = false;
  #isSilent = false;

  constructor(context: WorkerContext) {
    const { clock, local, log, settings, tracer } = context;
    const { extensionMs, requiresKvPeer } = settings;
    this.#context = context;
    this.engines = consumerEngines(context);
    this.#requests = new ProducedRequests({ clock });
    this.#endedRegistrations = new EndedRegistrations({ clock });
    this.#dispatcher = new WriteDispatcher(context, this.engines);
    if (settings.isLayerwise) {
      const regions = local.regions.map(({ name }) => name);
      this.#layerwise = new LayerwiseWrites({ dispatcher: this.#dispatcher, regions });
    }
    this.#guard = new MessageGuard({ requiresKvPeer, log });
    const onExpired = (wireId: string) => this.#leaseExpired(wireId);
    this.#leases = new Leases({ clock, extensionMs, tracer, onExpired });
    this.#matcher = new RegistrationMatcher({
      clock,
      requests: this.#requests,
      waitMs: { plain: settings.registrationTimeoutMs, own: settings.kvPeerRegistrationTimeoutMs },
      onExpired: (key, registration) => {
        const message = "the prompt did not reach the prefill worker in time";
        this.#refuse(key, registration, new KvError("KV_REQUEST_TIMEOUT", message));
      },
    });
  }

  step({
    incarnation,
    inBatch,
    notSent,
    leases,
    lost = [],
    schedulerClockMs,
  }: PrefillWorkerStep): void {
    if (this.#incarnation === undefined) {
      for (const [key, registration, error] of this.#matcher.takeOfOthers(incarnation))
        this.#refuse(key, registration, error);
    }
    this.#incarnation = incarnation;
    for (const order of inBatch) this.#requests.admit(order);
    for (const requestId of notSent) this.#requestNotSent(requestId);
    for (const order of leases) {
      const request = this.#requests.finish(order);
      this.#leases.grant(order, schedulerClockMs);
      for (const [key, registration] of this.#matcher.takeFor(request))
        this.#write(key, registration, request);
      for (const [key, registration, error] of this.#matcher.takeMismatched(request))
        this.#refuse(key, registration, error);
    }
    for (const requestId of lost) this.#context.output.sent(requestId);
  }

  layerComputed({ regions, computedTokens }: ComputedLayer): void {
    if (this.#closed || this.#layerwise === undefined) return;
    for (const [requestId, tokens] of Object.entries(computedTokens)) {
      const request = this.#requests.byRequestId(requestId);
      if (request === undefined || request.finished !== undefined) continue;
      const { numTokens, promptBlockIds } = request.order;
      // A prompt's last chunk completes a layer.
      if (promptBlockIds === undefined || numTokens === undefined || tokens < numTokens) continue;
      this.#layerwise.layerComputed(request, regions, this.#matcher.waitingFor(request));
    }
  }

  notified(notification: KvNotification, from: string): boolean {
    switch (notification.kind) {
      case "heartbeat":
        this.heartbeat(
          notification.requestIds.map((requestId) => ({ requestId })),
          from,
        );
        return true;
      case "push-registration":
        this.register(decodeRegistration(notification.registration), from);
        return true;
      case "extension": {
        const push = decodePushControl(notification.message);
        if (push?.kind === "withdrawal") {
          this.withdraw(push.registration, from);
          return true;
        }
        const request = decodeRequestControl(notification.message);
        if (request?.kind !== "heartbeat") return false;
        this.heartbeat(request.requests, from);
        return true;
      }
      default:
        return false;
    }
  }

  /** Takes a registration (`PUSH_REG:`), perhaps twice: all ranks of a vLLM D send the same one. */
  register(registration: Registration, from: string): void {
    const key = registrationKey(registration);
    const isKnown =
      this.#writes.has(key) || this.#endedRegistrations.has(key) || this.#matcher.isWaiting(key);
    if (this.#closed || isKnown) return;
    if (registration.own === undefined && this.#context.settings.requiresKvPeer) {
      const { wireId: request, engineId } = registration;
      const setting = "require_kv_peer";
      this.#context.log.debug("push-registration-of-plain-peer", {
        request,
        engineId,
        from,
        setting,
      });
      return;
    }
    if (this.#isValid(key, registration)) this.#match(key, registration, from);
  }

  /** D gets a notice when no WRITE of the registration is in flight and none will come. */
  withdraw(registration: Registration, from: string): void {
    if (this.#closed) return;
    const key = registrationKey(registration);
    const error = new KvError("KV_REQUEST_ABORTED", `request ${registration.wireId} was withdrawn`);
    const write = this.#writes.get(key);
    if (write !== undefined) {
      write.withdrawn = true;
      write.controller.abort(error);
      return;
    }
    this.#matcher.delete(key);
    const hasEnded = this.#endedRegistrations.has(key);
    if (!hasEnded && !this.#isValid(key, registration)) return;
    // The registration may still arrive. It counts as ended.
    this.#end(key, registration, error);
    // A withdrawal waits for its prompt and frees it.
    if (!hasEnded) this.#match(`${key} nothing`, registration, from);
  }

  /** An `@kv` D names wire id and capability; vLLM's D names the proxy's request. */
  heartbeat(named: readonly NamedRequest[], from: string): void {
    for (const { requestId: name, capability } of named) {
      const exact = this.#requests.byWireId(name);
      const requests = exact === undefined ? this.#requests.byName("alias", name) : [exact];
      for (const request of requests)
        if (this.#guard.mayAct(request, capability, from)) this.#leases.extend([request.wireId]);
    }
  }

  outstanding(): Record<
    | "batch"
    | "leases"
    | "registrations"
    | "registrationBytes"
    | "names"
    | "writes"
    | "writeQueues"
    | "endedNotices"
    | "layerwiseWrites",
    number
  > {
    return {
      batch: this.#requests.size,
      leases: this.#leases.size,
      registrations: this.#matcher.size,
      registrationBytes: this.#matcher.bytes,
      names: this.#requests.names + this.#matcher.names,
      writes: this.#writes.size + this.#dispatcher.size,
      writeQueues: this.#dispatcher.queues,
      endedNotices: this.#telling.size,
      layerwiseWrites: (this.#layerwise?.size ?? 0) + this.#releasing.size,
    };
  }

  /**
   * Aborts all and waits up to `CLOSE_GRACE_MS` until no WRITE touches memory. With a reason, tells
   * the waiting D's and reports finished requests as sent.
   */
  async close(reason?: KvError): Promise<void> {
    const { clock, log, output } = this.#context;
    this.#closed = true;
    this.#isSilent = reason === undefined;
    const ended = reason ?? new KvError("KV_AGENT_CLOSED", "the worker was closed");
    for (const [key, registration] of this.#matcher.takeAll())
      if (reason !== undefined) this.#refuse(key, registration, reason);
    this.#layerwise?.close();
    this.#leases.close();
    for (const { controller } of this.#writes.values()) controller.abort(ended);
    if (!(await idleWithinGrace(clock, [this.#dispatcher, this.#serving, this.#telling])))
      log.warn("close-did-not-wait", { writes: this.#dispatcher.size });
    this.#isSilent = true;
    if (reason !== undefined)
      for (const { requestId, finished } of this.#requests)
        if (finished !== undefined) output.sent(requestId);
    this.#requests.clear();
  }

  #requestNotSent(requestId: string): void {
    const request = this.#requests.byRequestId(requestId);
    if (request !== undefined) {
      // With layer-wise push the engine keeps the blocks until the worker's report.
      if (this.#layerwise === undefined) this.#requests.end(request);
      else this.#free(request);
    }
    const transferId = request?.transferId;
    for (const [key, registration] of this.#matcher.takeNaming({ requestId, transferId })) {
      const message = `request ${requestId} ended at the prefill worker before its prompt was computed`;
      this.#refuse(key, registration, new KvError("KV_REQUEST_ABORTED", message));
    }
  }

  #isValid(key: string, registration: Registration): boolean {
    const { producerEngineId, own } = registration;
    const { engineId } = this.#context.options.engine;
    if (producerEngineId !== engineId) {
      const message = `this is engine ${engineId}, the registration is for engine ${producerEngineId}`;
      this.#refuse(key, registration, new KvError("KV_HANDSHAKE_WRONG_ENGINE", message));
      return false;
    }
    if (this.#endedRegistrations.isOpen(registration)) return true;
    const message = `generation ${own?.generation} of its blocks has ended`;
    this.#refuse(key, registration, new KvError("KV_GENERATION_STALE", message));
    return false;
  }

  #match(key: string, registration: Registration, from: string): void {
    const match = this.#matcher.find(registration, this.#incarnation);
    if (match === undefined) this.#wait(key, registration, from);
    else if (KvError.is(match)) this.#refuse(key, registration, match);
    else this.#write(key, registration, match);
  }

  #wait(key: string, registration: Registration, from: string): void {
    for (const [lostKey, lost] of this.#matcher.wait(key, registration)) {
      const { engineId } = lost;
      const waiting = this.#matcher.size;
      this.#context.log.error("push-registrations-full", { from, engineId, waiting });
      const message = `the registrations that wait at the prefill worker hold more than ${MAX_WAITING_BYTES / 2 ** 20} MiB, those of this engine most`;
      this.#refuse(lostKey, lost, new KvError("KV_REQUEST_INVALID", message));
    }
  }

  /** Without blocks, a registration only marks its rank as served. */
  #write(key: string, registration: Registration, request: ProducedRequest): void {
    let ranks: readonly number[];
    try {
      ranks = this.#ranksToServe(registration, request);
    } catch (error) {
      const refusal = KvError.from(error, "KV_TOPOLOGY_INVALID", "a registration cannot be served");
      this.#refuse(key, registration, refusal);
      return;
    }
    const { finished: order, progress } = request;
    if (registration.blockIds.length === 0 || order === undefined || progress === undefined) {
      this.#end(key, registration);
      this.#served(request, ranks);
      return;
    }
    let written: ReadonlySet<string> = new Set<string>();
    const controller = new AbortController();
    const includesRegion = (region: string) => !written.has(region);
    const write: DispatchedWrite = { registration, ranks, order, includesRegion, controller };
    this.#writes.set(key, write);
    progress.writing += 1;
    const serve = async () => {
      if (this.#layerwise !== undefined)
        written = await this.#layerwise.finish(key, order, controller.signal);
      this.#end(key, registration, await this.#dispatcher.write(write));
    };
    this.#serving.track(
      serve().then(() => {
        this.#writes.delete(key);
        progress.writing -= 1;
        this.#served(request, ranks);
      }),
    );
  }

  /**
   * The D ranks that a registration is for. The first match decides the D.
   * @throws `KV_GENERATION_STALE` where the request has ended; `KV_REQUEST_INVALID` for a rank that this one does not serve.
   */
  #ranksToServe(registration: Registration, request: ProducedRequest): readonly number[] {
    if (!this.#requests.isCurrent(request))
      throw new KvError("KV_GENERATION_STALE", "the request with that id has ended");
    const { tpSize, own, engineId } = registration;
    const remote = { tpSize, dcpSize: own?.dcpSize };
    request.progress ??= {
      consumer: consumerRequestKey(registration),
      ranks: ranksToAsk(this.#context.local, remote, "decode").tpRanks,
      servedRanks: new Set(),
      writing: 0,
    };
    const { ranks } = request.progress;
    if (own === undefined) return ranks;
    if (ranks.includes(own.rank)) return [own.rank];
    throw new KvError(
      "KV_REQUEST_INVALID",
      `this rank does not serve rank ${own.rank} of engine ${engineId}, only ${ranks.join(", ")}`,
    );
  }

  #served(request: ProducedRequest, served: readonly number[]): void {
    const { servedRanks, ranks, writing } = request.progress as WriteProgress;
    for (const rank of served) servedRanks.add(rank);
    if (writing > 0 || !this.#requests.isCurrent(request)) return;
    // If the lease ended during the write, no further rank is awaited.
    if (servedRanks.size === ranks.length || !this.#leases.has(request.wireId))
      this.#complete(request);
  }

  #leaseExpired(wireId: string): void {
    const { metrics, log } = this.#context;
    const request = this.#requests.byWireId(wireId);
    if (request === undefined) return;
    const { writing = 0, servedRanks } = request.progress ?? {};
    // A running WRITE's end frees the blocks.
    if (writing > 0) return;
    metrics.leaseExpired();
    const { requestId } = request;
    log.warn("lease-expired", { requestId, ranks: servedRanks?.size ?? 0 });
    this.#complete(request);
  }

  #complete(request: ProducedRequest): void {
    this.#leases.release(request.wireId);
    this.#free(request);
  }

  /** Reports the request as sent when no layer-wise write reads its blocks. */
  #free(request: ProducedRequest): void {
    const { output } = this.#context;
    this.#requests.end(request);
    const released = this.#layerwise?.release(request);
    if (released === undefined) output.sent(request.requestId);
    else this.#releasing.track(released.then(() => output.sent(request.requestId)));
  }

  #refuse(key: string, registration: Registration, error: KvError): void {
    const { wireId: request, engineId } = registration;
    const { code, message } = error;
    this.#context.log.info("push-refused", { request, engineId, code, error: message });
    this.#end(key, registration, error);
  }

  /**
   * The one end of a registration. After an error, D gets a notice: no WRITE is in flight, and none
   * will come.
   */
  #end(key: string, registration: Registration, error?: KvError): void {
    this.#endedRegistrations.add(key);
    if (error === undefined || this.#isSilent) return;
    const ended = this.#layerwise?.abort(key, error) ?? Promise.resolve();
    if (this.#dispatcher.canTell(registration))
      this.#telling.track(ended.then(() => this.#dispatcher.tellEnded(registration, error)));
  }
}
