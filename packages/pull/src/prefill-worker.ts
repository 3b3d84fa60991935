import {
  Leases,
  MessageGuard,
  type SendableRequest,
  type WorkerContext,
  type WorkerHalf,
} from "@kv/connector/building-blocks";
import type { KvError, Log } from "@kv/interface";
import { decodeRequestControl, type KvNotification, type RequestProof } from "@kv/protocol";
import type { PullStepMetadata } from "./step-metadata.js";

/** A request that runs or has finished on this engine. */
interface SendableState extends SendableRequest {
  /** Whether a reader has proved that it holds the request's parameters. */
  isProven: boolean;
  /**
   * True when all readers completed before the step that reports the request as finished. Only that
   * step confirms the end.
   */
  isReadEarly: boolean;
}

/** The part of a step that concerns P. */
export type PrefillOrders = Pick<
  PullStepMetadata,
  "schedulerClockMs" | "inBatch" | "notSent" | "leases" | "lost"
>;

type PrefillContext = Pick<
  WorkerContext,
  "clock" | "log" | "metrics" | "output" | "settings" | "tracer"
>;

/** A request as a heartbeat names it. */
export type HeartbeatRequest = Pick<RequestProof, "requestId"> & Partial<RequestProof>;

/**
 * P's half of a worker. It counts the readers of each finished request, extends leases by
 * heartbeats, and reports a request as sent when all readers are done with this rank's part, or
 * when its lease has ended.
 */
export class PrefillWorker implements WorkerHalf<PrefillOrders> {
  readonly #context: PrefillContext;
  // Requests are added by the step that runs them, not by the step that finishes them: their
  // parameters reach a D without a step, and the D may complete first.
  readonly #byWireId = new Map<string, SendableState>();
  readonly #byRequestId = new Map<string, SendableState>();
  readonly #guard: MessageGuard;
  readonly #completions: CompletionCounter;
  readonly #leases: Leases;

  constructor(context: PrefillContext) {
    this.#context = context;
    const { requiresKvPeer } = context.settings;
    this.#guard = new MessageGuard({ requiresKvPeer, log: context.log });
    this.#completions = new CompletionCounter({ log: context.log });
    this.#leases = new Leases({
      clock: context.clock,
      extensionMs: context.settings.extensionMs,
      tracer: context.tracer,
      onExpired: (wireId) => this.#leaseExpired(wireId),
    });
  }

  /** Takes the requests that run, that ended with nothing to send, and that finished. */
  step({ schedulerClockMs, inBatch, notSent, leases, lost = [] }: PrefillOrders): void {
    for (const order of inBatch) {
      const { isReadEarly = false, isProven = false } = this.#byWireId.get(order.wireId) ?? {};
      const state = { isReadEarly, isProven, ...order };
      this.#byWireId.set(order.wireId, state);
      this.#byRequestId.set(order.requestId, state);
    }
    for (const requestId of notSent) {
      const state = this.#byRequestId.get(requestId);
      if (state === undefined) continue;
      this.#completions.forget(state.wireId);
      this.#forget(state);
    }
    for (const order of leases) {
      const state = this.#byWireId.get(order.wireId);
      if (state === undefined) continue;
      if (state.isReadEarly) this.#sent(state);
      else this.#leases.grant(order, schedulerClockMs);
    }
    for (const requestId of lost) this.#context.output.sent(requestId);
  }

  /** Takes a completion or a heartbeat, in vLLM's form or with the requests' capabilities. */
  notified(notification: KvNotification, from: string): boolean {
    switch (notification.kind) {
      case "done":
        this.done(notification.requestId, notification.readers, from);
        return true;
      case "heartbeat":
        this.heartbeat(
          notification.requestIds.map((requestId) => ({ requestId })),
          from,
        );
        return true;
      case "extension": {
        const message = decodeRequestControl(notification.message);
        if (message?.kind === "done")
          this.done(message.requestId, message.readers, from, message.capability);
        if (message?.kind === "heartbeat") this.heartbeat(message.requests, from);
        return message !== undefined;
      }
      default:
        return false;
    }
  }

  /**
   * Takes a completion of a reader, identified by its agent's name. `readers` is the number of
   * readers that this rank waits for; `capability` is undefined in vLLM's form.
   */
  done(wireId: string, readers: number, reader: string, capability?: string): void {
    const { log, metrics } = this.#context;
    const state = this.#byWireId.get(wireId);
    if (state === undefined) {
      metrics.notificationAfterExpiry();
      log.warn("notification-for-unknown-request", { requestId: wireId, reader });
      return;
    }
    if (!this.#guard.mayAct(state, capability, reader) || state.isReadEarly) return;
    if (this.#completions.add(wireId, reader, readers) !== "complete") return;
    if (this.#leases.release(wireId)) this.#sent(state);
    else state.isReadEarly = true;
  }

  /** Extends the leases of the requests that a heartbeat names, where its sender may. */
  heartbeat(requests: readonly HeartbeatRequest[], from: string): void {
    const mayExtend = requests.filter(({ requestId, capability }) => {
      const state = this.#byWireId.get(requestId);
      return state !== undefined && this.#guard.mayAct(state, capability, from);
    });
    this.#leases.extend(mayExtend.map(({ requestId }) => requestId));
  }

  /** Numbers of leases, of requests with some readers done, and of known requests. */
  outstanding(): { readonly leases: number; readonly completions: number; readonly batch: number } {
    return {
      leases: this.#leases.size,
      completions: this.#completions.size,
      batch: this.#byWireId.size,
    };
  }

  /** Forgets all requests. With a reason, those that wait for readers are reported as sent. */
  closeLast(reason?: KvError): void {
    const waiting = [...this.#byWireId.values()].filter(({ wireId }) => this.#leases.has(wireId));
    if (reason !== undefined)
      for (const { requestId } of waiting) this.#context.output.sent(requestId);
    this.#leases.close();
    this.#byWireId.clear();
    this.#byRequestId.clear();
  }

  #leaseExpired(wireId: string): void {
    const { log, metrics } = this.#context;
    const readers = this.#completions.forget(wireId);
    const state = this.#byWireId.get(wireId);
    metrics.leaseExpired();
    log.warn("lease-expired", { requestId: state?.requestId ?? wireId, readers });
    if (state !== undefined) this.#sent(state);
  }

  #sent(state: SendableState): void {
    this.#forget(state);
    this.#context.output.sent(state.requestId);
  }

  #forget({ wireId, requestId }: SendableState): void {
    this.#byWireId.delete(wireId);
    this.#byRequestId.delete(requestId);
  }
}

interface Readers {
  readonly readers: Set<string>;
  expected: number;
}

/**
 * Counts the readers of each finished request. Every reader of one rank of P sends `"{id}:{n}"`
 * once, where n is the number of readers that this rank has. The rank is done with the request
 * after n readers. A reader is an agent: a duplicate notification, or an abort after a completed
 * transfer, counts once.
 */
export class CompletionCounter {
  readonly #log: Log;
  readonly #entries = new Map<string, Readers>();

  constructor({ log }: { readonly log: Log }) {
    this.#log = log;
  }

  /** Counts a reader. Returns "complete" exactly once per request, and then forgets the request. */
  add(requestId: string, reader: string, expected: number): "complete" | "waiting" | "duplicate" {
    let entry = this.#entries.get(requestId);
    if (entry === undefined) {
      entry = { readers: new Set(), expected };
      this.#entries.set(requestId, entry);
    }
    if (entry.readers.has(reader)) return "duplicate";
    entry.readers.add(reader);
    if (entry.expected !== expected) {
      // The number depends on the sizes of both engines, so the readers of one engine agree. Here
      // two engines got the same request. The greater number frees the blocks later, at the end of
      // the lease at the latest.
      this.#log.warn("completion-consumers-disagree", {
        requestId,
        reader,
        announced: expected,
        before: entry.expected,
      });
      entry.expected = Math.max(entry.expected, expected);
    }
    if (entry.readers.size < entry.expected) return "waiting";
    this.#entries.delete(requestId);
    return "complete";
  }

  forget(requestId: string): number {
    const readers = this.#entries.get(requestId)?.readers.size ?? 0;
    this.#entries.delete(requestId);
    return readers;
  }

  get size(): number {
    return this.#entries.size;
  }
}
