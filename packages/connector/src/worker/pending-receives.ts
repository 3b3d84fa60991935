import { type Clock, KvError, type Log, type Timer } from "@kv/interface";
import type { Background } from "./task-tracker.js";
import type { RemoteRequest } from "../scheduler/step-types.js";
import type { Outbox } from "./worker-output.js";
import { type ReceiveBroken, receiveBroken } from "./receive-error.js";

/** What a scheduler side orders of which the engine waits for the outcome. */
export interface AwaitedOrder {
  readonly requestId: string;
  readonly remote: RemoteRequest;
  readonly localBlockIds: readonly (readonly number[])[];
}

/** Requests whose KV a consumer's worker is fetching: each runs on its own, and ends in the outbox, at its deadline at the latest. */
export interface AwaitedRequests<Order extends AwaitedOrder> {
  start(order: Order, fetching: Fetching<Order>): void;
  abort(requestId: string, reason: KvError): void;
  get(requestId: string): AwaitedRequest<Order> | undefined;
  values(): Iterable<AwaitedRequest<Order>>;
  /** The engine is gone: no verdict is wanted on any of them. */
  abortAll(reason: KvError): void;
  /** Nothing is reported from now on: a run may end though a peer can still write to its blocks. */
  abandonAll(): void;
  readonly size: number;
}

export interface Fetching<Order extends AwaitedOrder> {
  /** Settles when nothing can touch the request's blocks any more. */
  run(entry: AwaitedRequest<Order>): Promise<void>;
  /** Before the outcome is reported. */
  ended?(entry: AwaitedRequest<Order>, broken: ReceiveBroken | undefined): void;
}

export interface AwaitedRequest<Order extends AwaitedOrder> {
  readonly order: Order;
  readonly signal: AbortSignal;
  /** The engine gave it up: it wants the blocks back, and no verdict on them. */
  readonly aborted: boolean;
  /** Ends it with a verdict. */
  fail(reason: KvError): void;
  /** The outcome is known, but a peer may write to the blocks yet: reported so, and once more when `run` has settled. */
  blocksAtRisk(broken: ReceiveBroken): void;
}

export interface AwaitedRequestsOptions {
  readonly clock: Clock;
  readonly log: Log;
  readonly outbox: Outbox;
  readonly background: Background;
  /** From the order to the KV in place. */
  readonly timeoutMs: number;
  /** Several KV cache groups: block ids of one group do not say what is invalid, requests do. */
  readonly singleGroup: boolean;
}

export function createAwaitedRequests<Order extends AwaitedOrder>(
  options: AwaitedRequestsOptions,
): AwaitedRequests<Order> {
  const { clock, log, outbox, background, timeoutMs, singleGroup } = options;
  interface Entry extends AwaitedRequest<Order> {
    readonly controller: AbortController;
    readonly timer: Timer;
    aborted: boolean;
    reported: boolean;
  }
  const entries = new Map<string, Entry>();
  let abandoned = false;

  function late({ requestId, remote: { engineId } }: Order): KvError {
    const message = `the KV of request ${requestId} did not arrive from engine ${engineId} within ${timeoutMs} ms`;
    return new KvError("KV_REQUEST_TIMEOUT", message, { details: { engineId, timeoutMs } });
  }

  function report({ order }: Entry, { error, failureType }: ReceiveBroken, blocksAtRisk: boolean): void {
    log.warn("receive-failed", {
      requestId: order.requestId,
      engineId: order.remote.engineId,
      failureType,
      code: error.code,
      error: error.message,
      ...(blocksAtRisk ? { blocksAtRisk } : {}),
    });
    const invalid = singleGroup ? (order.localBlockIds[0] ?? []) : [];
    outbox.receiveFailed(order.requestId, { error, failureType, blocksAtRisk }, invalid);
  }

  function abort(entry: Entry, reason: KvError): void {
    entry.aborted = true;
    entry.controller.abort(reason);
  }

  return {
    start(order, { run, ended }) {
      const { requestId } = order;
      if (entries.has(requestId)) {
        // Only a scheduler that lost count sends it; two transfers into the same blocks must not be.
        log.error("receive-ordered-twice", { requestId });
        return;
      }
      const controller = new AbortController();
      const { signal } = controller;
      const entry: Entry = {
        order,
        signal,
        controller,
        timer: clock.setTimer(() => controller.abort(late(order)), timeoutMs, { ref: true }),
        aborted: false,
        reported: false,
        fail: (reason) => controller.abort(reason),
        blocksAtRisk(broken) {
          if (entry.aborted) return;
          entry.reported = true;
          report(entry, broken, true);
        },
      };
      entries.set(requestId, entry);
      const over = (broken?: ReceiveBroken) => {
        entry.timer.cancel();
        entries.delete(requestId);
        ended?.(entry, broken);
      };
      background.track(
        run(entry).then(
          () => {
            over();
            if (!abandoned) outbox.received(requestId);
          },
          (thrown: unknown) => {
            const broken = receiveBroken(thrown, "KV_INTERNAL", "transfer_exception", signal);
            over(broken);
            if (abandoned) return;
            if (entry.reported) outbox.secured(requestId);
            else if (entry.aborted) outbox.received(requestId);
            else report(entry, broken, false);
          },
        ),
      );
    },
    abort(requestId, reason) {
      const entry = entries.get(requestId);
      if (entry !== undefined) abort(entry, reason);
    },
    get: (requestId) => entries.get(requestId),
    values: () => entries.values(),
    abortAll(reason) {
      for (const entry of entries.values()) abort(entry, reason);
    },
    abandonAll() {
      abandoned = true;
    },
    get size() {
      return entries.size;
    },
  };
}
