import {
  addressOf,
  createKeepAlive,
  type FreshLinkOptions,
  freshLink,
  type HeartbeatOrder,
  isMeant,
  type Messages,
  type Outbox,
  type RemoteLink,
  type TransferMetrics,
} from "@kv/connector";
import { type Clock, KvError, type Log, type Timer } from "@kv/interface";
import type { Readers } from "./readers.js";
import { broken, type ReceiveOptions, receive } from "./receive.js";
import type { ReceiveOrder } from "./step-metadata.js";

/**
 * The consumer's half of a worker: every order of the scheduler becomes a receive of its own, which waits for its peer's handshake, not
 * the step for it; each ends in the outbox, at its deadline at the latest.
 */
export interface DecodeWorker {
  step(step: DecodeWorkerStep): void;
  outstanding(): { receives: number; tells: number; heartbeats: number };
  /**
   * Gives everything up, and waits until no transfer can touch memory any more; not longer than 10 s, for a transport may hang on a dead
   * peer: what is left then is the agent's to end.
   */
  close(): Promise<void>;
}

export interface DecodeWorkerStep {
  readonly schedulerClockMs: number;
  readonly receives: readonly ReceiveOrder[];
  readonly aborts: readonly string[];
  readonly heartbeats: readonly HeartbeatOrder[] | null;
}

export interface DecodeWorkerOptions
  extends FreshLinkOptions,
    Pick<ReceiveOptions, "agent" | "verify" | "transferred" | "settle"> {
  readonly clock: Clock;
  readonly log: Log;
  readonly metrics: TransferMetrics;
  readonly outbox: Outbox;
  readonly messages: Messages;
  readonly readers: Readers;
  readonly heartbeatIntervalMs: number;
  readonly requestTimeoutMs: number;
  /** Several KV cache groups: block ids of one group do not say what is invalid, requests do. */
  readonly singleGroup: boolean;
  keptUntilMs(order: ReceiveOrder, link: RemoteLink, heartbeatsAtMs: readonly number[]): number;
}

const CLOSE_GRACE_MS = 10_000;

interface Receiving {
  readonly controller: AbortController;
  readonly timer: Timer;
  /** The engine gave it up: it wants the blocks back, and no verdict on them. */
  aborted: boolean;
}

export function createDecodeWorker(options: DecodeWorkerOptions): DecodeWorker {
  const { clock, log, metrics, messages, outbox, peers, readers } = options;
  const receiving = new Map<string, Receiving>();
  const runs = new Set<Promise<void>>();
  const tells = new Set<Promise<void>>();
  const keepAlive = createKeepAlive({
    clock,
    intervalMs: options.heartbeatIntervalMs,
    peers,
    messages,
    track: (work) => track(tells, work),
  });

  const receiveOptions: ReceiveOptions = {
    agent: options.agent,
    clock,
    readers,
    link: (order, signal) => freshLink(order.remote, signal, options),
    lost: (peer, reason) => peers.drop(peer.address.engineId, reason, peer),
    ...(options.verify === undefined ? {} : { verify: options.verify }),
    keptUntilMs: (order, peer) =>
      options.keptUntilMs(order, peer, keepAlive.beatsAtMs(order.remote.engineId, order.remote.requestId)),
    transferred: options.transferred,
    transferFailed(error, order, remoteRank) {
      metrics.transferFailed();
      log.warn("transfer_failed", {
        requestId: order.requestId,
        engineId: order.remote.engineId,
        remoteRank,
        error: error.message,
      });
    },
    settle: options.settle,
  };

  function start(order: ReceiveOrder): void {
    const { requestId } = order;
    if (receiving.has(requestId)) {
      // Only a scheduler that lost count sends it; two READs into the same blocks must not be.
      log.error("receive-ordered-twice", { requestId });
      return;
    }
    const controller = new AbortController();
    const timeout = () =>
      controller.abort(
        new KvError(
          "KV_REQUEST_TIMEOUT",
          `the KV of request ${requestId} did not arrive from engine ${order.remote.engineId} within ${options.requestTimeoutMs} ms`,
          { details: { engineId: order.remote.engineId, timeoutMs: options.requestTimeoutMs } },
        ),
      );
    const timer = clock.setTimer(timeout, options.requestTimeoutMs, { ref: true });
    const entry: Receiving = { controller, timer, aborted: false };
    receiving.set(requestId, entry);
    const { signal } = controller;
    const over = () => {
      timer.cancel();
      receiving.delete(requestId);
    };
    track(
      runs,
      receive(order, signal, receiveOptions).then(
        () => {
          over();
          outbox.received(requestId);
        },
        (thrown: unknown) => {
          over();
          const failure = broken(thrown, "KV_INTERNAL", "transfer_exception", signal);
          // Given up before there was anyone to tell.
          if (signal.aborted && failure.failureType === "handshake_failed") tell(order);
          if (entry.aborted) {
            outbox.received(requestId);
            return;
          }
          if (failure.failureType === "lease_expired") metrics.leaseExpired();
          log.warn("receive-failed", {
            requestId,
            engineId: order.remote.engineId,
            failureType: failure.failureType,
            code: failure.error.code,
            error: failure.error.message,
          });
          const invalid = options.singleGroup ? (order.localBlockIds[0] ?? []) : [];
          outbox.receiveFailed(requestId, failure, invalid);
        },
      ),
    );
  }

  /** Nothing is read: the producer may free the blocks. */
  function tell(order: ReceiveOrder): void {
    const { remote } = order;
    track(
      tells,
      peers.acquire(addressOf(remote)).then(
        (hold) => {
          if (isMeant(hold.peer, remote)) readers.tell(hold.peer, remote.requestId, hold.peer.agents.keys());
          hold.release();
        },
        (error: unknown) => {
          metrics.notificationFailed();
          log.warn("notification_failed", { requestId: remote.requestId, error: String(error) });
        },
      ),
    );
  }

  return {
    step(step) {
      const nowMs = clock.now();
      for (const order of step.receives) {
        // The scheduler's clock may have another origin than this one.
        const seenAtMs = nowMs - (step.schedulerClockMs - order.seenAtMs);
        if (order.awaited) start({ ...order, seenAtMs });
        else tell(order);
      }
      for (const requestId of step.aborts) {
        const entry = receiving.get(requestId);
        if (entry === undefined) continue;
        entry.aborted = true;
        entry.controller.abort(new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted`));
      }
      if (step.heartbeats !== null) keepAlive.replace(step.heartbeats);
    },
    outstanding: () => ({
      receives: receiving.size,
      tells: tells.size + messages.pending,
      heartbeats: keepAlive.size,
    }),
    async close() {
      let graceTimer: Timer | undefined;
      keepAlive.close();
      for (const { controller } of receiving.values()) {
        controller.abort(new KvError("KV_AGENT_CLOSED", "the worker was closed"));
      }
      let late = false;
      const grace = new Promise<void>((resolve) => {
        graceTimer = clock.setTimer(() => {
          late = true;
          resolve();
        }, CLOSE_GRACE_MS);
      });
      while (!late && runs.size + tells.size + messages.pending > 0) {
        await Promise.race([Promise.all([...runs, ...tells, messages.drained()]), grace]);
      }
      graceTimer?.cancel();
      if (late) log.warn("close-did-not-wait", { receives: runs.size, tells: tells.size + messages.pending });
    },
  };
}

/** `promise` never rejects. */
function track(all: Set<Promise<void>>, promise: Promise<void>): void {
  const tracked = promise.finally(() => all.delete(tracked));
  all.add(tracked);
}
