import {
  askLease,
  createLocalLists,
  createMessages,
  createPairPeers,
  createReceivePass,
  createRemoteAgents,
  createRemoteLinks,
  hearNotifications,
  type KvNotification,
  modelGeometry,
  type PeerAddress,
  type RemoteLink,
  type RemoteRequest,
  transferMetrics,
  type WorkerHalves,
  type WorkerSurroundings,
} from "@kv/connector";
import { decodeControl, decodeRegistration } from "./control.js";
import { createDecodeWorker } from "./decode/decode-worker.js";
import { pushStepMetadata } from "./step-metadata.js";
import { type WriteOptions, writeBlocks } from "./prefill/write-blocks.js";
import { createWriteLinks, type WriteLink } from "./prefill/consumer-link.js";
import { createPushWriter } from "./prefill/push-writer.js";

/** How long what has ended is remembered: whatever was on its way has arrived by then. */
const REMEMBER_MS = 600_000;

/** Both halves of a worker, around one agent. */
export function createWorkerParts(around: WorkerSurroundings): WorkerHalves {
  const { settings, agent, caches, local, handshake, outbox } = around;
  const { sideChannel, config, engine } = around.options;
  const { clock, log } = around.ambient;
  const metrics = transferMetrics(around.ambient.metrics);
  const messages = createMessages({ agent, log });
  const shared = {
    agent,
    log,
    localLists: createLocalLists(agent),
    remoteAgents: createRemoteAgents(agent),
    local,
    model: modelGeometry(caches.config),
    shakeHands: (address: PeerAddress, tpRanks: readonly number[]) => handshake.ask(address, tpRanks, local),
  };

  const producers = createPairPeers<RemoteLink>({
    clock,
    log,
    metrics,
    settings,
    failureType: "push_reg_handshake_failed",
    ...createRemoteLinks({
      ...shared,
      ...(caches.config.prefixCaching === undefined ? {} : { prefixCaching: caches.config.prefixCaching }),
      conversions: config.enablePermuteLocalKv ? ["hnd-to-nhd"] : [],
      prepareLists: false,
    }),
  });
  const consumers = createPairPeers<WriteLink>({
    clock,
    log,
    metrics,
    settings,
    failureType: "handshake_setup_failed",
    ...createWriteLinks(shared),
  });
  const tpRank = around.options.tpRank;
  const { tpSize, engineId } = engine;

  const writeOptions: WriteOptions = {
    agent,
    messages,
    tpRank,
    tpSize,
    transferred: metrics.transferred,
    notificationFailed(error, target) {
      metrics.notificationFailed();
      log.warn("notification_failed", { agent: target.agent, error: String(error) });
    },
  };
  const writer = createPushWriter({
    clock,
    log,
    metrics,
    outbox,
    messages,
    peers: consumers,
    engineId,
    tpRank,
    tpSize,
    extensionMs: settings.extensionMs,
    writeTimeoutMs: settings.requestTimeoutMs,
    offerMs: settings.registrationTimeoutMs,
    rememberMs: REMEMBER_MS,
    ...(settings.layerwise ? { layerwise: { regions: local.regions.map(({ name }) => name) } } : {}),
    write: (link, ranks, pair, signal, part) => writeBlocks(link, ranks, pair, signal, writeOptions, part),
  });

  const decode = createDecodeWorker({
    clock,
    log,
    metrics,
    outbox,
    messages,
    peers: producers,
    engineId,
    tpRank,
    tpSize,
    heartbeatIntervalMs: settings.heartbeatIntervalMs,
    registrationTimeoutMs: settings.registrationTimeoutMs,
    blocksAtRiskMs: settings.blocksAtRiskMs,
    handshakeTimeoutMs: settings.handshakeTimeoutMs,
    groups: caches.config.groups,
    settle: createReceivePass({ caches }),
    currentIncarnation: async (remote: RemoteRequest, signal) => {
      const { engineId: producer, requestId, host, port, lease } = remote;
      const question = { engineId: producer, requestId, generation: lease?.generation };
      const asked = { sideChannel, host, port, timeoutMs: settings.handshakeTimeoutMs, signal };
      return (await askLease(question, asked)).incarnation;
    },
  });
  hearNotifications(agent, log, heard);

  function heard(notification: KvNotification, from: string): void {
    switch (notification.kind) {
      case "done":
        decode.done(notification.requestId, from);
        return;
      case "heartbeat":
        writer.heartbeat(notification.requestIds);
        return;
      case "push-registration":
        writer.offer(decodeRegistration(notification.registration), from);
        return;
      case "own": {
        const control = decodeControl(notification.message);
        if (control?.kind === "withdrawal") writer.withdraw(control.offer, from);
        else if (control?.kind === "ended") decode.ended(control.ended, from);
        else log.debug("notification-not-for-push", { from, type: notification.message.type });
      }
    }
  }

  return {
    peers: [producers, consumers],
    step(step) {
      const orders = pushStepMetadata(step);
      writer.step(orders);
      decode.step(orders);
    },
    layer: writer.layer,
    outstanding: () => ({ ...writer.outstanding(), ...decode.outstanding() }),
    async close() {
      await Promise.all([writer.close(), decode.close()]);
    },
  };
}
