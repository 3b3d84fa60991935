import {
  createConnectorWorker,
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
import { DecodeWorker } from "./decode-worker.js";
import { PrefillWorker } from "./prefill-worker.js";
import { PUSH, pushStepMetadata } from "./step-metadata.js";

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
  readonly #prefill: PrefillWorker;
  readonly #decode: DecodeWorker;

  constructor(context: WorkerContext) {
    const { agent, log, options } = context;
    this.#context = context;
    if (options.config.enablePermuteLocalKv) {
      const reason = "push always converts HND blocks of P for an NHD cache of D";
      log.warn("setting-not-used", { key: "enable_permute_local_kv", value: true, reason });
    }
    this.#prefill = new PrefillWorker(context);
    this.#decode = new DecodeWorker(context);
    this.peers = [this.#decode.engines.table, this.#prefill.engines.table];
    receiveNotifications(agent, log, (notification, from) => this.#notified(notification, from));
  }

  step(step: StepMetadata): void {
    const orders = pushStepMetadata(step);
    this.#prefill.step(orders);
    this.#decode.step(orders);
  }

  layer(layer: ComputedLayer): void {
    this.#prefill.layerComputed(layer);
  }

  outstanding(): Readonly<Record<string, number>> {
    return { ...this.#prefill.outstanding(), ...this.#decode.outstanding() };
  }

  async close(): Promise<void> {
    await Promise.all([this.#prefill.close(), this.#decode.close()]);
  }

  /** Passes a notification to the half that it is for. Errors: `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`. */
  #notified(notification: KvNotification, from: string): void {
    switch (notification.kind) {
      case "done":
        this.#decode.done(notification.requestId, from);
        return;
      case "heartbeat":
        this.#prefill.heartbeat(
          notification.requestIds.map((requestId) => ({ requestId })),
          from,
        );
        return;
      case "push-registration":
        this.#prefill.register(decodeRegistration(notification.registration), from);
        return;
      case "extension":
        this.#extended(notification.message, from);
    }
  }

  #extended(message: ExtensionMessage, from: string): void {
    const push = decodePushControl(message);
    if (push?.kind === "withdrawal") this.#prefill.withdraw(push.registration, from);
    else if (push?.kind === "ended") this.#decode.ended(push.ended, from);
    else if (push?.kind === "written") this.#decode.written(push.written, from);
    else {
      const request = decodeRequestControl(message);
      if (request?.kind === "heartbeat") this.#prefill.heartbeat(request.requests, from);
      else this.#context.log.debug("notification-not-for-push", { from, type: message.type });
    }
  }
}
