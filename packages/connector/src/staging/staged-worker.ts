import {
  type Clock,
  KvError,
  type Log,
  type Platform,
  type Staging,
  type Tracer,
  type Transport,
  type WorkerConnector,
  type WorkerOutput,
} from "@kv/interface";
import { createLoads } from "./staged-loads.js";
import { createSaves } from "./staged-saves.js";
import type { StagingCopied } from "./staging-step.js";
import { stagingOrders } from "./staging-step.js";

export interface StagedWorkerOptions {
  readonly platform: Platform;
  readonly transport: Transport;
  readonly poolBlocks: number;
  readonly clock: Clock;
  readonly log: Log;
  readonly tracer: Tracer | undefined;
  readonly onCopied?: (copied: StagingCopied) => void;
}

/**
 * Worker side of a staged connector. The inner connector registers the pool; a received request is
 * copied to the device before it is reported.
 */
export function stagedWorker(
  inner: WorkerConnector,
  options: StagedWorkerOptions,
): WorkerConnector {
  const { platform, transport, poolBlocks } = options;
  let staging: Staging | undefined;
  const listeners: (() => void)[] = [];
  const notifyListeners = () => {
    for (const listener of listeners) listener();
  };
  const opened = (): Staging => {
    if (staging !== undefined) return staging;
    throw new KvError("KV_INTERNAL", "the worker connector has no KV caches yet, or is closed", {
      hint: "await registerKvCaches first",
    });
  };
  const saves = createSaves({ ...options, staging: opened });
  const loads = createLoads({ ...options, staging: opened, loaded: notifyListeners });

  /**
   * Starts the copy to the device as soon as a transfer is done, not with the engine's next step.
   */
  function collect(): void {
    loads.landed(inner.collectFinished());
    if (loads.reportable > 0) notifyListeners();
  }
  inner.onProgress(collect);

  return {
    name: inner.name,
    async registerKvCaches(caches) {
      if (staging !== undefined)
        throw new KvError("KV_INTERNAL", "registerKvCaches was called before");
      if (platform.createStaging === undefined) {
        throw new KvError(
          "KV_PLATFORM_UNSUPPORTED",
          `platform ${platform.deviceType} has no staging`,
        );
      }
      const { config } = caches;
      const { clock } = options;
      staging = await platform.createStaging({ transport, config, caches, poolBlocks, clock });
      saves.openWith(config);
      await inner.registerKvCaches(staging.wireCaches);
    },
    handshakeMetadata: () => inner.handshakeMetadata(),
    startLoad(step) {
      const orders = stagingOrders(step);
      if (orders !== undefined) {
        for (const requestId of orders.over) {
          saves.forget(requestId);
          loads.forget(requestId);
        }
        for (const requestId of orders.saved) saves.ended(requestId);
        for (const order of orders.saves) saves.expect(order);
        for (const order of orders.loads) loads.expect(order);
      }
      inner.startLoad(step);
    },
    async waitForSave(step, computed) {
      if (saves.size > 0) await saves.run(computed);
      await inner.waitForSave(step, computed);
    },
    collectFinished(): WorkerOutput {
      loads.landed(inner.collectFinished());
      return loads.take();
    },
    onProgress(listener) {
      listeners.push(listener);
    },
    outstanding: () => ({ ...inner.outstanding(), saves: saves.size, ...loads.outstanding() }),
    async close() {
      // Deregister the pool from the transport first. Copies in progress keep their memory until
      // they are done.
      await inner.close();
      await loads.settled();
      await staging?.close();
      staging = undefined;
    },
  };
}
