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

interface SendableState extends SendableRequest {
  /** A reader has proved that it holds the request's parameters. */
  isProven: boolean;
  isReadEarly: boolean;
}

export type PrefillOrders = Pick<
  PullStepMetadata,
  "schedulerClockMs" | "inBatch" | "notSent" | "leases" | "lost"
>;

type PrefillContext = Pick<
  WorkerContext,
  "clock" | "log" | "metrics" | "output" | "settings" | "tracer"
>;

export type HeartbeatRequest = Pick<RequestProof, "requestId"> & Partial<RequestProof>;

/**
 * P's half of a worker. Counts each finished request's readers and extends leases. Reports a
 * request as sent when all readers are done or the lease has ended.
 */
export class PrefillWorker implements WorkerHalf<PrefillOrders> {
  readonly #context: PrefillContext;
  // Requests enter with the step that runs them: a D gets their parameters without a step and may
  // complete first.
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
   * `reader`: an agent. `readers`: how many this rank waits for. `capability`: undefined for vLLM.
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
    if (!this.#completions.add(wireId, reader, readers)) return;
    if (this.#leases.release(wireId)) this.#sent(state);
    else state.isReadEarly = true;
  }

  heartbeat(requests: readonly HeartbeatRequest[], from: string): void {
    const mayExtend = requests.filter(({ requestId, capability }) => {
      const state = this.#byWireId.get(requestId);
      return state !== undefined && this.#guard.mayAct(state, capability, from);
    });
    this.#leases.extend(mayExtend.map(({ requestId }) => requestId));
  }

  outstanding(): Record<"leases" | "completions" | "batch", number> {
    return {
      leases: this.#leases.size,
      completions: this.#completions.size,
      batch: Math.max(this.#byWireId.size, this.#byRequestId.size),
    };
  }

  /** Forgets all requests. With a reason, reports waiting ones as sent. */
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
    const state = this.#byWireId.get(wireId);
    if (state === undefined) return;
    const readers = this.#completions.forget(wireId);
    metrics.leaseExpired();
    log.warn("lease-expired", { requestId: state.requestId, readers });
    this.#sent(state);
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
 * Each of n readers sends `"{id}:{n}"`. An agent counts once, so duplicates and aborts after a
 * completed transfer do no harm.
 */
class CompletionCounter {
  readonly #log: Log;
  readonly #entries = new Map<string, Readers>();

  constructor({ log }: { readonly log: Log }) {
    this.#log = log;
  }

  /** True once per request, when it is complete; then forgets it. */
  add(requestId: string, reader: string, expected: number): boolean {
    let entry = this.#entries.get(requestId);
    if (entry === undefined) {
      entry = { readers: new Set(), expected };
      this.#entries.set(requestId, entry);
    }
    if (entry.readers.has(reader)) return false;
    entry.readers.add(reader);
    if (entry.expected !== expected) {
      // Two engines got one request. The greater number frees the blocks later, at the lease's end
      // at the latest.
      this.#log.warn("completion-consumers-disagree", {
        requestId,
        reader,
        announced: expected,
        before: entry.expected,
      });
      entry.expected = Math.max(entry.expected, expected);
    }
    return entry.readers.size >= entry.expected && this.#entries.delete(requestId);
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
