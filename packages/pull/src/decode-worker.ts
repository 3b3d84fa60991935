import {
  type AwaitedRequest,
  createAwaitedRequests,
  createBackground,
  createKeepAlive,
  type FreshLinkOptions,
  freshLink,
  type HeartbeatOrder,
  idleWithin,
  type Messages,
  type Outbox,
  type ReceiveBroken,
  type RemoteLink,
  type TransferMetrics,
  tellPeer,
} from "@kv/connector";
import { type Clock, KvError, type Log } from "@kv/interface";
import type { Readers } from "./completion-notifier.js";
import { type ReceiveOptions, receive } from "./receive.js";
import type { ReceiveOrder } from "./step-metadata.js";

/**
 * The consumer's half of a worker: every order of the scheduler becomes a receive of its own, which waits for its peer's handshake, not
 * the step for it; each ends in the outbox, at its deadline at the latest.
 */
export interface DecodeWorker {
  step(step: DecodeWorkerStep): void;
  outstanding(): { receives: number; tells: number; heartbeats: number };
  /** Gives everything up, and waits until no transfer can touch memory any more; not longer than `CLOSE_GRACE_MS`. */
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

export function createDecodeWorker(options: DecodeWorkerOptions): DecodeWorker {
  const { clock, log, metrics, messages, outbox, peers, readers } = options;
  const runs = createBackground();
  const tells = createBackground();
  const awaited = createAwaitedRequests<ReceiveOrder>({
    clock,
    log,
    outbox,
    background: runs,
    timeoutMs: options.requestTimeoutMs,
    singleGroup: options.singleGroup,
  });
  const keepAlive = createKeepAlive({
    clock,
    intervalMs: options.heartbeatIntervalMs,
    peers,
    messages,
    track: tells.track,
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

  const fetching = {
    run: ({ order, signal }: AwaitedRequest<ReceiveOrder>) => receive(order, signal, receiveOptions),
    ended(entry: AwaitedRequest<ReceiveOrder>, broken: ReceiveBroken | undefined) {
      // Given up before there was anyone to tell.
      if (entry.signal.aborted && broken?.failureType === "handshake_failed") tell(entry.order);
      if (!entry.aborted && broken?.failureType === "lease_expired") metrics.leaseExpired();
    },
  };

  /** Nothing is read: the producer may free the blocks. */
  function tell({ remote }: ReceiveOrder): void {
    tellPeer(remote, (link) => readers.tell(link, remote.requestId, link.agents.keys()), {
      peers,
      background: tells,
      failed(error) {
        metrics.notificationFailed();
        log.warn("notification_failed", { requestId: remote.requestId, error: String(error) });
      },
    });
  }

  return {
    step(step) {
      const nowMs = clock.now();
      for (const order of step.receives) {
        // The scheduler's clock may have another origin than this one.
        const seenAtMs = nowMs - (step.schedulerClockMs - order.seenAtMs);
        if (order.awaited) awaited.start({ ...order, seenAtMs }, fetching);
        else tell(order);
      }
      for (const requestId of step.aborts) {
        awaited.abort(requestId, new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted`));
      }
      if (step.heartbeats !== null) keepAlive.replace(step.heartbeats);
    },
    outstanding: () => ({
      receives: awaited.size,
      tells: tells.size + messages.size,
      heartbeats: keepAlive.size,
    }),
    async close() {
      keepAlive.close();
      // Not aborted by the engine: whoever asks what became of them gets an answer.
      for (const entry of awaited.values())
        entry.fail(new KvError("KV_AGENT_CLOSED", "the worker was closed"));
      if (await idleWithin(clock, [runs, tells, messages])) return;
      log.warn("close-did-not-wait", { receives: runs.size, tells: tells.size + messages.size });
    },
  };
}
