import {
  askLease,
  createPeers,
  decodeNotification,
  encodeNotification,
  type LeaseAnswer,
  type Peers,
} from "@kv/connector";
import {
  type Agent,
  type Ambient,
  type KvCaches,
  KvError,
  type Staging,
  type WorkerOptions,
} from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import { createDecodeWorker, type DecodeWorker } from "./decode-worker.js";
import { keptUntilMs } from "./lease-trust.js";
import { createLocalLists } from "./local-lists.js";
import type { Outbox } from "./outbox.js";
import { createPrefillWorker, type PrefillWorker } from "./prefill-worker.js";
import { pullMetrics } from "./pull-metrics.js";
import { createReaders } from "./readers.js";
import { createReceivePass } from "./receive-pass.js";
import { createRemoteAgents } from "./remote-agents.js";
import { createRemoteLinks, type RemoteLink } from "./remote-link.js";
import type { PullSettings } from "./settings.js";
import type { PullHandshake } from "./shake-hands.js";
import type { ReceiveOrder } from "./step-metadata.js";

/** A worker's halves around one agent. */
export interface WorkerParts {
  readonly prefill: PrefillWorker;
  readonly decode: DecodeWorker;
  readonly peers: Peers<RemoteLink>;
}

export interface WorkerPartsOptions {
  readonly ambient: Ambient;
  readonly settings: PullSettings;
  readonly options: Pick<WorkerOptions, "config" | "sideChannel">;
  readonly agent: Agent;
  /** What is registered: the device's caches, or the host buffers that stand in for them. */
  readonly caches: KvCaches;
  readonly staging: Staging | undefined;
  readonly local: RankGeometry;
  readonly handshake: PullHandshake;
  readonly outbox: Outbox;
}

/** A few hundred ids a message: well below any transport's limit. */
const HEARTBEAT_IDS = 256;

export function createWorkerParts(given: WorkerPartsOptions): WorkerParts {
  const { settings, agent, caches, local, handshake, outbox } = given;
  const { sideChannel, config } = given.options;
  const { clock, log } = given.ambient;
  const metrics = pullMetrics(given.ambient.metrics);

  const links = createRemoteLinks({
    agent,
    log,
    localLists: createLocalLists(agent),
    remoteAgents: createRemoteAgents(agent),
    local,
    numKvHeads: caches.config.numKvHeads,
    groups: caches.config.groups.map(({ kind }) => kind),
    conversions: config.enablePermuteLocalKv ? ["hnd-to-nhd"] : [],
    shakeHands: (address, tpRanks) => handshake.ask(address, tpRanks, local),
  });
  const peers = createPeers<RemoteLink>({
    clock,
    log,
    engineTtlMs: settings.engineTtlMs,
    async open(address) {
      try {
        return await links.open(address);
      } catch (error) {
        // Once per handshake, however many requests wait for it.
        metrics.handshakeFailed();
        log.warn("handshake_setup_failed", {
          engineId: address.engineId,
          host: address.host,
          port: address.port,
          error: String(error),
        });
        throw error;
      }
    },
    close: links.close,
  });
  const readers = createReaders({
    agent,
    log,
    metrics,
    encodeDone: (requestId, readersOfRank) =>
      encodeNotification({ kind: "done", requestId, readers: readersOfRank }),
    encodeHeartbeats: (wireIds) =>
      chunks(wireIds.filter(sayable), HEARTBEAT_IDS).map((requestIds) =>
        encodeNotification({ kind: "heartbeat", requestIds }),
      ),
  });

  function ask({ remote }: ReceiveOrder, signal: AbortSignal): Promise<LeaseAnswer> {
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
    readers,
    heartbeatIntervalMs: settings.heartbeatIntervalMs,
    requestTimeoutMs: settings.requestTimeoutMs,
    singleGroup: caches.config.groups.length === 1,
    transferred: metrics.transferred,
    settle: createReceivePass({ caches, staging: given.staging }),
    currentIncarnation: async (order, signal) => (await ask(order, signal)).incarnation,
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
      const { held, incarnation } = await ask(order, signal);
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
  listen().catch((error: unknown) => log.error("notifications-ended", { error: String(error) }));

  /** Until the agent closes. A bad notification is logged; nothing that a peer sends ends this. */
  async function listen(): Promise<void> {
    for await (const { from, payload } of agent.notifications()) {
      try {
        const notification = decodeNotification(payload);
        if (notification.kind === "done") prefill.done(notification.requestId, notification.readers, from);
        else if (notification.kind === "heartbeat") prefill.heartbeat(notification.requestIds);
        else log.warn("notification-not-for-pull", { from, kind: notification.kind });
      } catch (error) {
        log.warn("notification-refused", { from, error: String(error) });
      }
    }
  }

  return { prefill, decode, peers };
}

/** A vLLM producer splits heartbeats at commas: an id that holds one cannot be said, and its lease ends unextended. */
function sayable(wireId: string): boolean {
  return !wireId.includes(",");
}

function chunks<T>(list: readonly T[], length: number): T[][] {
  const parts: T[][] = [];
  for (let i = 0; i < list.length; i += length) parts.push(list.slice(i, i + length));
  return parts;
}
