import {
  askLease,
  createLocalLists,
  createMessages,
  createPairPeers,
  createReceivePass,
  createRemoteAgents,
  createRemoteLinks,
  hearNotifications,
  modelGeometry,
  type RemoteLink,
  type RemoteRequest,
  transferMetrics,
  type WorkerHalves,
  type WorkerSurroundings,
} from "@kv/connector";
import { KvError } from "@kv/interface";
import type { LeaseReply } from "@kv/protocol";
import { createDecodeWorker } from "./decode-worker.js";
import { keptUntilMs } from "./lease-deadline.js";
import { createPrefillWorker } from "./prefill-worker.js";
import { createReaders } from "./completion-notifier.js";
import { pullStepMetadata } from "./step-metadata.js";

/** Both halves of a worker, around one agent. */
export function createWorkerParts(given: WorkerSurroundings): WorkerHalves {
  const { settings, agent, caches, local, handshake, outbox } = given;
  const { sideChannel, config } = given.options;
  const { clock, log } = given.ambient;
  const metrics = transferMetrics(given.ambient.metrics);

  const links = createRemoteLinks({
    agent,
    log,
    localLists: createLocalLists(agent),
    remoteAgents: createRemoteAgents(agent),
    local,
    model: modelGeometry(caches.config),
    ...(caches.config.prefixCaching === undefined ? {} : { prefixCaching: caches.config.prefixCaching }),
    conversions: config.enablePermuteLocalKv ? ["hnd-to-nhd"] : [],
    joinsGroups: true,
    shakeHands: (address, tpRanks) => handshake.ask(address, tpRanks, local),
  });
  const peers = createPairPeers<RemoteLink>({
    clock,
    log,
    metrics,
    settings,
    failureType: "handshake_setup_failed",
    ...links,
  });
  const messages = createMessages({ agent, log });
  const readers = createReaders({ messages, log, metrics });

  function ask(remote: RemoteRequest, signal: AbortSignal): Promise<LeaseReply> {
    const { engineId, requestId, host, port, lease } = remote;
    return askLease(
      { engineId, requestId, generation: lease?.generation },
      { sideChannel, host, port, timeoutMs: settings.handshakeTimeoutMs, signal },
    );
  }

  const decode = createDecodeWorker({
    agent,
    clock,
    log,
    metrics,
    outbox,
    peers,
    messages,
    readers,
    heartbeatIntervalMs: settings.heartbeatIntervalMs,
    requestTimeoutMs: settings.requestTimeoutMs,
    singleGroup: caches.config.groups.length === 1,
    transferred: metrics.transferred,
    settle: createReceivePass({ caches }),
    currentIncarnation: async (remote, signal) => (await ask(remote, signal)).incarnation,
    keptUntilMs: (order, link, heartbeatsAtMs) =>
      keptUntilMs({
        expirySeconds: order.remote.expirySeconds,
        clock: link.clock,
        seenAtMs: order.seenAtMs,
        leaseMs: settings.leaseMs,
        extensionMs: settings.extensionMs,
        marginMs: settings.leaseMarginMs,
        heartbeatsAtMs,
      }),
    async verify(order, link, signal) {
      const { held, incarnation } = await ask(order.remote, signal);
      if (held && incarnation === link.incarnation) return;
      const { engineId, requestId } = order.remote;
      throw new KvError(
        "KV_LEASE_EXPIRED",
        `engine ${engineId} did not keep the blocks of request ${requestId} until they were read: what was read is not used`,
        {
          hint: "the lease ran out, another reader was done with the request, or the prefill worker was restarted; send the prompt to it again",
          details: { engineId, requestId, incarnation: link.incarnation, answeredBy: incarnation },
        },
      );
    },
  });

  const prefill = createPrefillWorker({ clock, log, metrics, outbox, extensionMs: settings.extensionMs });
  hearNotifications(agent, log, (notification, from) => {
    if (notification.kind === "done") prefill.done(notification.requestId, notification.readers, from);
    else if (notification.kind === "heartbeat") prefill.heartbeat(notification.requestIds);
    else log.warn("notification-not-for-pull", { from, kind: notification.kind });
  });

  return {
    peers: [peers],
    step(step) {
      const orders = pullStepMetadata(step);
      prefill.step(orders);
      decode.step(orders);
    },
    outstanding: () => ({ ...prefill.outstanding(), ...decode.outstanding() }),
    close: decode.close,
    closeLast: prefill.close,
  };
}
