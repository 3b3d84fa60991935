import {
  createConnectorWorker,
  PeerTable,
  receiveNotifications,
  type WorkerContext,
  type WorkerHalves,
} from "@kv/connector/building-blocks";
import type { ComputedLayer, StepMetadata, WorkerConnector, WorkerOptions } from "@kv/interface";
import {
  decodePushControl,
  decodeRegistration,
  decodeRequestControl,
  type ExtensionMessage,
  type KvNotification,
  PUSH_CONTROL,
  REQUEST_CONTROL,
} from "@kv/protocol";
import { ConsumerLinks } from "./consumer-link.js";
import { DecodeWorker } from "./decode-worker.js";
import { PrefillWorker } from "./prefill-worker.js";
import { PUSH, pushStepMetadata } from "./step-metadata.js";

/** How long ended requests and registrations are remembered. Messages about them that are still in flight arrive within this time. */
const REMEMBER_MS = 600_000;

/**
 * Creates the worker side of push, for one rank: P's and D's half around one agent. Errors: `KV_TRANSPORT_UNSUPPORTED`,
 * `KV_PLATFORM_UNSUPPORTED`, `KV_CONFIG_INVALID`.
 */
export function createPushWorker(options: WorkerOptions): WorkerConnector & AsyncDisposable {
  return createConnectorWorker(options, {
    name: PUSH,
    transferMode: "push",
    operation: "write",
    features: [PUSH_CONTROL, REQUEST_CONTROL],
    createHalves: (context) => new PushWorkerHalves(context),
  });
}

/** P's and D's half of a worker. They share one agent. */
class PushWorkerHalves implements WorkerHalves {
  readonly peers: WorkerHalves["peers"];
  readonly #context: WorkerContext;
  readonly #writer: PrefillWorker;
  readonly #decode: DecodeWorker;

  constructor(context: WorkerContext) {
    const { agent, clock, log, metrics, settings, local, options, output, notifications, tracer } = context;
    this.#context = context;
    if (options.config.enablePermuteLocalKv) {
      const reason = "push always converts HND blocks of P for an NHD cache of D";
      log.warn("setting-not-used", { key: "enable_permute_local_kv", value: true, reason });
    }
    const links = new ConsumerLinks(context);
    const consumers = new PeerTable({
      clock,
      log,
      metrics,
      engineTtlMs: settings.engineTtlMs,
      failureType: "handshake_setup_failed",
      open: (address) => links.open(address),
      close: (link) => links.close(link),
    });
    this.#writer = new PrefillWorker({
      agent,
      clock,
      log,
      metrics,
      tracer,
      output,
      notifications,
      consumers,
      engineId: options.engine.engineId,
      tpRank: options.tpRank,
      tpSize: options.engine.tpSize,
      extensionMs: settings.extensionMs,
      writeTimeoutMs: settings.requestTimeoutMs,
      registrationWaitMs: settings.registrationTimeoutMs,
      rememberMs: REMEMBER_MS,
      requiresKvPeer: settings.requiresKvPeer,
      layerwiseRegions: settings.isLayerwise ? local.regions.map(({ name }) => name) : undefined,
    });
    this.#decode = new DecodeWorker(context);
    this.peers = [this.#decode.engines.table, consumers];
    receiveNotifications(agent, log, (notification, from) => this.#notified(notification, from));
  }

  step(step: StepMetadata): void {
    const orders = pushStepMetadata(step);
    this.#writer.step(orders);
    this.#decode.step(orders);
  }

  layer(layer: ComputedLayer): void {
    this.#writer.layerComputed(layer);
  }

  outstanding(): Readonly<Record<string, number>> {
    return { ...this.#writer.outstanding(), ...this.#decode.outstanding() };
  }

  async close(): Promise<void> {
    await Promise.all([this.#writer.close(), this.#decode.close()]);
  }

  /** Passes a notification to the half that it is for. Errors: `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`. */
  #notified(notification: KvNotification, from: string): void {
    switch (notification.kind) {
      case "done":
        this.#decode.done(notification.requestId, from);
        return;
      case "heartbeat":
        this.#writer.heartbeat(
          notification.requestIds.map((requestId) => ({ requestId })),
          from,
        );
        return;
      case "push-registration":
        this.#writer.register(decodeRegistration(notification.registration), from);
        return;
      case "extension":
        this.#extended(notification.message, from);
    }
  }

  #extended(message: ExtensionMessage, from: string): void {
    const push = decodePushControl(message);
    if (push?.kind === "withdrawal") this.#writer.withdraw(push.registration, from);
    else if (push?.kind === "ended") this.#decode.ended(push.ended, from);
    else if (push?.kind === "written") this.#decode.written(push.written, from);
    else {
      const request = decodeRequestControl(message);
      if (request?.kind === "heartbeat") this.#writer.heartbeat(request.requests, from);
      else this.#context.log.debug("notification-not-for-push", { from, type: message.type });
    }
  }
}
