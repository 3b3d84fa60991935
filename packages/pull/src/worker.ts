import {
  createConnectorWorker,
  receiveNotifications,
  type WorkerContext,
  type WorkerHalves,
} from "@kv/connector/building-blocks";
import type { StepMetadata, WorkerConnector, WorkerOptions } from "@kv/interface";
import { decodeRequestControl, type KvNotification, REQUEST_CONTROL } from "@kv/protocol";
import { DecodeWorker } from "./decode-worker.js";
import { PrefillWorker } from "./prefill-worker.js";
import { PULL, pullStepMetadata } from "./step-metadata.js";

/**
 * Creates the worker side of pull, for one rank: P's and D's half around one agent. Errors: `KV_TRANSPORT_UNSUPPORTED`,
 * `KV_PLATFORM_UNSUPPORTED`, `KV_CONFIG_INVALID`.
 */
export function createPullWorker(options: WorkerOptions): WorkerConnector & AsyncDisposable {
  return createConnectorWorker(options, {
    name: PULL,
    transferMode: "pull",
    operation: "read",
    features: [REQUEST_CONTROL],
    createHalves: (context) => new PullWorkerHalves(context),
  });
}

class PullWorkerHalves implements WorkerHalves {
  readonly #context: WorkerContext;
  readonly #prefill: PrefillWorker;
  readonly #decode: DecodeWorker;

  constructor(context: WorkerContext) {
    this.#context = context;
    this.#prefill = new PrefillWorker(context);
    this.#decode = new DecodeWorker(context);
    receiveNotifications(context.agent, context.log, (notification, from) =>
      this.#notified(notification, from),
    );
  }

  get peers() {
    return [this.#decode.engines.table];
  }

  step(step: StepMetadata): void {
    const orders = pullStepMetadata(step);
    this.#prefill.step(orders);
    this.#decode.step(orders);
  }

  outstanding(): Readonly<Record<string, number>> {
    return { ...this.#prefill.outstanding(), ...this.#decode.outstanding() };
  }

  close(): Promise<void> {
    return this.#decode.close();
  }

  closeLast(): void {
    this.#prefill.close();
  }

  /** Errors: `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`. */
  #notified(notification: KvNotification, from: string): void {
    switch (notification.kind) {
      case "done":
        this.#prefill.done(notification.requestId, notification.readers, from);
        return;
      case "heartbeat":
        this.#prefill.heartbeat(
          notification.requestIds.map((requestId) => ({ requestId })),
          from,
        );
        return;
      case "extension": {
        const message = decodeRequestControl(notification.message);
        if (message?.kind === "done")
          this.#prefill.done(message.requestId, message.readers, from, message.capability);
        else if (message?.kind === "heartbeat") this.#prefill.heartbeat(message.requests, from);
        else this.#context.log.debug("notification-not-for-pull", { from, type: notification.message.type });
        return;
      }
      case "push-registration":
        this.#context.log.warn("notification-not-for-pull", { from, kind: notification.kind });
    }
  }
}
