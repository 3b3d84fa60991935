import {
  askLease,
  createLocalLists,
  createMessages,
  createPairPeers,
  createReceivePass,
  createRemoteAgents,
  createRemoteLinks,
  createWorkerShell,
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
import type { Log, WorkerConnector, WorkerOptions } from "@kv/interface";
import { decodeControl, decodeRegistration, PUSH_CONTROL } from "./control.js";
import { DecodeWorker } from "./decode/decode-worker.js";
import { type ConsumerLink, createConsumerLinks } from "./prefill/consumer-link.js";
import { PushWriter } from "./prefill/push-writer.js";
import { PUSH, pushStepMetadata } from "./step-metadata.js";

/** How long ended requests and registrations are remembered: a message about them that is still on its way arrives earlier. */
const REMEMBER_MS = 600_000;

/** Creates the worker side of push, of one rank. Errors: those of `createWorkerShell`. */
export function createPushWorker(options: WorkerOptions): WorkerConnector {
  return createWorkerShell(options, {
    name: PUSH,
    transferMode: "push",
    operation: "write",
    features: [PUSH_CONTROL],
    createHalves,
  });
}

/** Creates the producer's and the consumer's half of a worker. They share one agent. */
function createHalves(around: WorkerSurroundings): WorkerHalves {
  const { settings, agent, caches, local, handshake, outbox } = around;
  const { config, engine, tpRank } = around.options;
  const { clock, log } = around.ambient;
  const metrics = transferMetrics(around.ambient.metrics);
  const messages = createMessages({ agent, log });
  const links = {
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
      ...links,
      ...(caches.config.prefixCaching === undefined ? {} : { prefixCaching: caches.config.prefixCaching }),
      conversions: config.enablePermuteLocalKv ? ["hnd-to-nhd"] : [],
      prepareLists: false,
    }),
  });
  const consumers = createPairPeers<ConsumerLink>({
    clock,
    log,
    metrics,
    settings,
    failureType: "handshake_setup_failed",
    ...createConsumerLinks(links),
  });
  const shared = {
    clock,
    log,
    metrics,
    outbox,
    messages,
    engineId: engine.engineId,
    tpRank,
    tpSize: engine.tpSize,
  };
  const writer = new PushWriter({
    ...shared,
    agent,
    consumers,
    extensionMs: settings.extensionMs,
    writeTimeoutMs: settings.requestTimeoutMs,
    registrationWaitMs: settings.registrationTimeoutMs,
    rememberMs: REMEMBER_MS,
    layerwiseRegions: settings.layerwise ? local.regions.map(({ name }) => name) : undefined,
  });
  const decode = new DecodeWorker({
    ...shared,
    peers: producers,
    groups: caches.config.groups,
    heartbeatIntervalMs: settings.heartbeatIntervalMs,
    registrationTimeoutMs: settings.registrationTimeoutMs,
    blocksAtRiskMs: settings.blocksAtRiskMs,
    handshakeTimeoutMs: settings.handshakeTimeoutMs,
    receivePass: createReceivePass({ caches }),
    currentIncarnation: (remote, signal) => askIncarnation(around, remote, signal),
  });
  hearNotifications(agent, log, (notification, from) => route(notification, from, writer, decode, log));

  return {
    peers: [producers, consumers],
    step(step) {
      const orders = pushStepMetadata(step);
      writer.step(orders);
      decode.step(orders);
    },
    layer: (layer) => writer.layerComputed(layer),
    outstanding: () => ({ ...writer.outstanding(), ...decode.outstanding() }),
    async close() {
      await Promise.all([writer.close(), decode.close()]);
    },
  };
}

/** Hands a notification to the half that it is for. Errors: `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`. */
function route(
  notification: KvNotification,
  from: string,
  writer: PushWriter,
  decode: DecodeWorker,
  log: Log,
): void {
  switch (notification.kind) {
    case "done":
      decode.done(notification.requestId, from);
      return;
    case "heartbeat":
      writer.heartbeat(notification.requestIds);
      return;
    case "push-registration":
      writer.register(decodeRegistration(notification.registration), from);
      return;
    case "own": {
      const control = decodeControl(notification.message);
      if (control?.kind === "withdrawal") writer.withdraw(control.offer, from);
      else if (control?.kind === "ended") decode.ended(control.ended, from);
      else log.debug("notification-not-for-push", { from, type: notification.message.type });
    }
  }
}

/** Asks the producer at a request's address for its incarnation. Errors: those of `askLease`. */
async function askIncarnation(
  { options, settings }: WorkerSurroundings,
  { engineId, requestId, host, port, lease }: RemoteRequest,
  signal: AbortSignal,
): Promise<string> {
  const answer = await askLease(
    { engineId, requestId, generation: lease?.generation },
    { sideChannel: options.sideChannel, host, port, timeoutMs: settings.handshakeTimeoutMs, signal },
  );
  return answer.incarnation;
}
