import {
  idleWithinGrace,
  type LeaseOrder,
  type RemoteEngines,
  type WorkerContext,
  type WorkerHalf,
} from "@kv/connector/building-blocks";
import { type ComputedLayer, KvError } from "@kv/interface";
import {
  decodePushControl,
  decodeRegistration,
  decodeRequestControl,
  type ExtensionMessage,
  type KvNotification,
  type Registration,
} from "@kv/protocol";
import { type ConsumerEngine, consumerEngines } from "./prefill/consumer-engine.js";
import { EndedNotices } from "./prefill/ended-notices.js";
import { FinishedRequests, type NamedRequest } from "./prefill/finished-requests.js";
import { LayerwiseWrites } from "./prefill/layerwise-writes.js";
import { type ProducedRequest, ProducedRequests } from "./prefill/produced-requests.js";
import {
  EndedRegistrations,
  MAX_WAITING_BYTES,
  RegistrationMatcher,
  registrationKey,
} from "./prefill/registrations.js";
import { WriteDispatcher } from "./prefill/write-blocks.js";
import type { PushStepMetadata } from "./step-metadata.js";

/** The part of a step that concerns the producer. */
export type PrefillWorkerStep = Pick<
  PushStepMetadata,
  "schedulerClockMs" | "incarnation" | "inBatch" | "notSent" | "leases" | "lost"
>;

/**
 * How long ended requests and registrations are remembered. Messages about them that are still in
 * flight arrive within this time.
 */
const REMEMBER_MS = 600_000;

/**
 * P's half of a worker. It owns the registrations, the finished requests, their leases and the
 * WRITEs of one rank. It acts on events only (a step, a computed layer, a notification, the end of
 * a handshake or a transfer, the end of a lease) and never polls. No event waits for a handshake or
 * for a slow consumer.
 */
export class PrefillWorker implements WorkerHalf<PrefillWorkerStep> {
  readonly engines: RemoteEngines<ConsumerEngine>;
  readonly #context: WorkerContext;
  readonly #requests: ProducedRequests;
  readonly #endedRegistrations: EndedRegistrations;
  readonly #matcher: RegistrationMatcher;
  readonly #dispatcher: WriteDispatcher;
  readonly #layerwise: LayerwiseWrites | undefined;
  readonly #endedNotices: EndedNotices;
  readonly #finished: FinishedRequests;
  /** This producer's process; undefined before the first step. */
  #incarnation: string | undefined;
  #closed = false;

  constructor(context: WorkerContext) {
    const { clock, local, settings } = context;
    this.#context = context;
    this.engines = consumerEngines(context);
    this.#requests = new ProducedRequests({ clock, rememberMs: REMEMBER_MS });
    this.#endedRegistrations = new EndedRegistrations({ clock, rememberMs: REMEMBER_MS });
    this.#dispatcher = new WriteDispatcher(context, this.engines);
    const regions = local.regions.map(({ name }) => name);
    this.#layerwise = settings.isLayerwise
      ? new LayerwiseWrites({ dispatcher: this.#dispatcher, regions })
      : undefined;
    this.#endedNotices = new EndedNotices({
      context,
      consumers: this.engines,
      layerwise: this.#layerwise,
    });
    this.#finished = new FinishedRequests({
      context,
      requests: this.#requests,
      endedRegistrations: this.#endedRegistrations,
      dispatcher: this.#dispatcher,
      layerwise: this.#layerwise,
      endedNotices: this.#endedNotices,
    });
    this.#matcher = new RegistrationMatcher({
      clock,
      requests: this.#requests,
      waitMs: { plain: settings.registrationTimeoutMs, own: settings.kvPeerRegistrationTimeoutMs },
      onExpired: (key, registration) =>
        this.#refuse(
          key,
          registration,
          new KvError("KV_REQUEST_TIMEOUT", "the prompt did not reach the prefill worker in time"),
        ),
    });
  }

  /** Takes the requests that run, that ended without anything to send, and that finished. */
  step({
    incarnation,
    inBatch,
    notSent,
    leases,
    lost = [],
    schedulerClockMs,
  }: PrefillWorkerStep): void {
    this.#incarnation = incarnation;
    for (const order of inBatch) this.#requests.admit(order);
    for (const requestId of notSent) this.#requestNotSent(requestId);
    for (const order of leases) this.#requestFinished(order, schedulerClockMs);
    for (const requestId of lost) this.#context.output.sent(requestId);
  }

  /**
   * Writes a layer that was computed to the registrations that wait for its requests. Does nothing
   * if layer-wise push is off.
   */
  layerComputed({ regions, computedTokens }: ComputedLayer): void {
    if (this.#closed || this.#layerwise === undefined) return;
    for (const [requestId, tokens] of Object.entries(computedTokens)) {
      const request = this.#requests.byRequestId(requestId);
      if (request === undefined || request.finished !== undefined) continue;
      const { numTokens, promptBlockIds } = request.order;
      // A layer of a prompt in chunks is complete with the last chunk.
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
      case "extension":
        return this.#extended(notification.message, from);
      default:
        return false;
    }
  }

  /**
   * Takes a registration (`PUSH_REG:`) from the agent `from`: it is written, refused, or waits for
   * its prompt.
   */
  register(registration: Registration, from: string): void {
    const key = registrationKey(registration);
    if (this.#closed || this.#isKnown(key)) return;
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

  /**
   * Takes a withdrawal: the consumer gets a notice when no WRITE of the registration is in flight
   * and none will come.
   */
  withdraw(registration: Registration, from: string): void {
    if (this.#closed) return;
    const key = registrationKey(registration);
    const error = new KvError("KV_REQUEST_ABORTED", `request ${registration.wireId} was withdrawn`);
    // The end of the write sends the notice.
    if (this.#finished.withdraw(key, error)) return;
    this.#matcher.delete(key);
    if (this.#endedRegistrations.has(key)) {
      this.#endedNotices.send(key, registration, error);
      return;
    }
    if (!this.#isValid(key, registration)) return;
    // The registration itself may still arrive. It counts as ended.
    this.#endedRegistrations.add(key);
    this.#endedNotices.send(key, registration, error);
    // A withdrawal has no blocks: it waits for its prompt, and frees it.
    this.#match(`${key} nothing`, registration, from);
  }

  /** Extends the leases of the requests that a heartbeat of the agent `from` names. */
  heartbeat(named: readonly NamedRequest[], from: string): void {
    this.#finished.extendLeases(named, from);
  }

  /** Numbers of held resources, for tests and metrics; all are 0 when nothing is held. */
  outstanding(): {
    batch: number;
    leases: number;
    registrations: number;
    writes: number;
    endedNotices: number;
    layerwiseWrites: number;
  } {
    const { leases, releasing } = this.#finished.outstanding();
    return {
      batch: this.#requests.size,
      leases,
      registrations: this.#matcher.size,
      writes: this.#dispatcher.size,
      endedNotices: this.#endedNotices.size,
      layerwiseWrites: (this.#layerwise?.size ?? 0) + releasing,
    };
  }

  /**
   * Aborts everything, and waits until no WRITE can touch memory any more, for `CLOSE_GRACE_MS` at
   * most. With a reason, the consumers that wait are told, and finished requests are reported as
   * sent.
   */
  async close(reason?: KvError): Promise<void> {
    const { clock, log, output } = this.#context;
    this.#closed = true;
    const waiting = this.#matcher.takeAll();
    if (reason === undefined) this.#endedNotices.close();
    else for (const [key, registration] of waiting) this.#refuse(key, registration, reason);
    this.#layerwise?.close();
    this.#finished.close(reason);
    if (!(await idleWithinGrace(clock, [this.#dispatcher, this.#finished, this.#endedNotices]))) {
      log.warn("close-did-not-wait", { writes: this.#dispatcher.size });
    }
    this.#endedNotices.close();
    if (reason !== undefined)
      for (const { requestId, finished } of this.#requests)
        if (finished !== undefined) output.sent(requestId);
    this.#requests.clear();
  }

  #extended(message: ExtensionMessage, from: string): boolean {
    const push = decodePushControl(message);
    if (push?.kind === "withdrawal") {
      this.withdraw(push.registration, from);
      return true;
    }
    const request = decodeRequestControl(message);
    if (request?.kind !== "heartbeat") return false;
    this.heartbeat(request.requests, from);
    return true;
  }

  #requestFinished(order: LeaseOrder, schedulerClockMs: number): void {
    const request = this.#requests.finish(order);
    this.#finished.grantLease(order, schedulerClockMs);
    for (const [key, registration] of this.#matcher.takeFor(request)) {
      this.#write(key, registration, request);
    }
    for (const [key, registration, error] of this.#matcher.takeMismatched(request))
      this.#refuse(key, registration, error);
  }

  #requestNotSent(requestId: string): void {
    const request = this.#requests.byRequestId(requestId);
    if (request !== undefined) {
      // With layer-wise push the engine keeps the blocks until the worker reports the request: a
      // WRITE may read them.
      if (this.#layerwise === undefined) this.#requests.end(request);
      else this.#finished.free(request);
    }
    const transferId = request?.transferId;
    for (const [key, registration] of this.#matcher.takeNaming({ requestId, transferId })) {
      const message = `request ${requestId} ended at the prefill worker before its prompt was computed`;
      this.#refuse(key, registration, new KvError("KV_REQUEST_ABORTED", message));
    }
  }

  /**
   * True for a registration that was received before: all ranks of a vLLM consumer send the same
   * one, and a message may arrive twice.
   */
  #isKnown(key: string): boolean {
    return (
      this.#finished.isWriting(key) ||
      this.#endedRegistrations.has(key) ||
      this.#matcher.isWaiting(key)
    );
  }

  /** Refuses a registration that is for another engine, or whose generation has ended. */
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
    if (match.kind === "matched") this.#write(key, registration, match.request);
    else if (match.kind === "gone") this.#refuse(key, registration, match.error);
    else this.#wait(key, registration, from);
  }

  #wait(key: string, registration: Registration, from: string): void {
    for (const [lostKey, lost] of this.#matcher.wait(key, registration)) {
      const { engineId } = lost;
      this.#context.log.error("push-registrations-full", {
        from,
        engineId,
        waiting: this.#matcher.size,
      });
      const message = `the registrations that wait at the prefill worker hold more than ${MAX_WAITING_BYTES / 2 ** 20} MiB, those of this engine most`;
      this.#refuse(lostKey, lost, new KvError("KV_REQUEST_INVALID", message));
    }
  }

  #write(key: string, registration: Registration, request: ProducedRequest): void {
    try {
      this.#finished.write(key, registration, request);
    } catch (error) {
      this.#refuse(
        key,
        registration,
        KvError.from(error, "KV_TOPOLOGY_INVALID", "a registration cannot be served"),
      );
    }
  }

  #refuse(key: string, registration: Registration, error: KvError): void {
    const { wireId: request, engineId } = registration;
    this.#endedRegistrations.add(key);
    this.#context.log.info("push-refused", {
      request,
      engineId,
      code: error.code,
      error: error.message,
    });
    this.#endedNotices.send(key, registration, error);
  }
}
