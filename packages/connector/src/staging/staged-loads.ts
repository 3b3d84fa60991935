import {
  type Clock,
  type FailedReceive,
  KvError,
  type Log,
  type Staging,
  type Tracer,
  type WorkerOutput,
} from "@kv/interface";
import type { StagedRequest, StagingCopied } from "./staging-step.js";

/**
 * Decode: requests whose KV is transferred into the pool. Holds back the connector's reports until
 * the device has the blocks.
 */
export interface Loads {
  expect(order: StagedRequest): void;
  forget(requestId: string): void;
  /**
   * Takes the reports of the inner connector. Starts the copy to the device for each request whose
   * transfer is done.
   */
  landed(output: WorkerOutput): void;
  take(): WorkerOutput;
  readonly reportable: number;
  outstanding(): { readonly loads: number; readonly loading: number };
  settled(): Promise<void>;
}

export interface LoadsOptions {
  readonly clock: Clock;
  readonly log: Log;
  readonly tracer: Tracer | undefined;
  readonly onCopied?: (copied: StagingCopied) => void;
  staging(): Staging;
  loaded(): void;
}

export function createLoads({
  clock,
  log,
  tracer,
  onCopied,
  staging,
  loaded,
}: LoadsOptions): Loads {
  const requests = new Map<string, StagedRequest>();
  /**
   * Requests that the connector has reported. A second report (the blocks are no longer at risk) is
   * passed on.
   */
  const reported = new Set<string>();
  const loading = new Map<string, Promise<void>>();
  let finishedSending: string[] = [];
  let finishedReceiving: string[] = [];
  /** Requests whose KV no P compared with their prompt, until they are reported. */
  const unverified = new Set<string>();
  let failedReceiving: FailedReceive[] = [];
  let failedBlockIds: number[] = [];

  async function load(order: StagedRequest): Promise<void> {
    const { requestId } = order;
    const startedMs = clock.now();
    const span = tracer?.start("kv.stage_load", {
      parent: order.traceparent,
      attributes: { "kv.blocks": order.wire.flat().length },
    });
    try {
      await staging().load(requestId, order);
      span?.end();
      onCopied?.({
        requestId,
        direction: "load",
        wire: order.wire,
        durationMs: clock.now() - startedMs,
      });
    } catch (error) {
      span?.end(error);
      const { code, message } = KvError.from(
        error,
        "KV_STAGING_FAILED",
        `loading request ${requestId}`,
      );
      log.warn("staging-load-failed", { requestId, code, error: message });
      const blockIds = order.device.length === 1 ? [...(order.device[0] ?? [])] : [];
      failedReceiving.push({
        requestId,
        code,
        message,
        failureType: "transfer_exception",
        blockIds,
      });
      failedBlockIds.push(...blockIds);
    }
    loading.delete(requestId);
    finishedReceiving.push(requestId);
    loaded();
  }

  /**
   * Translates invalid blocks: the connector reports ids of pool blocks, the engine expects ids of
   * device blocks.
   */
  function onDevice(wireIds: readonly number[]): number[] {
    if (wireIds.length === 0) return [];
    const devices = new Map<number, number>();
    for (const { device, wire } of requests.values()) {
      wire[0]?.forEach((id, index) => {
        const deviceId = device[0]?.[index];
        if (deviceId !== undefined) devices.set(id, deviceId);
      });
    }
    return wireIds.flatMap((id) => devices.get(id) ?? []);
  }

  return {
    expect(order) {
      requests.set(order.requestId, order);
      reported.delete(order.requestId);
    },
    forget(requestId) {
      requests.delete(requestId);
      reported.delete(requestId);
    },
    landed(output) {
      const failed = new Set(output.failedReceiving.map(({ requestId }) => requestId));
      for (const failure of output.failedReceiving) {
        const { blockIds } = failure;
        failedReceiving.push({
          ...failure,
          ...(blockIds === undefined ? {} : { blockIds: onDevice(blockIds) }),
        });
      }
      failedBlockIds.push(...onDevice(output.failedBlockIds));
      finishedSending.push(...output.finishedSending);
      for (const requestId of output.unverifiedReceiving ?? []) unverified.add(requestId);
      for (const requestId of output.finishedReceiving) {
        const order = requests.get(requestId);
        const lands = order !== undefined && !failed.has(requestId) && !reported.has(requestId);
        if (order !== undefined) reported.add(requestId);
        if (lands) loading.set(requestId, load(order));
        else finishedReceiving.push(requestId);
      }
    },
    take() {
      const unverifiedReceiving = finishedReceiving.filter((requestId) =>
        unverified.delete(requestId),
      );
      const output = {
        finishedSending,
        finishedReceiving,
        ...(unverifiedReceiving.length === 0 ? {} : { unverifiedReceiving }),
        failedReceiving,
        failedBlockIds,
      };
      finishedSending = [];
      finishedReceiving = [];
      failedReceiving = [];
      failedBlockIds = [];
      return output;
    },
    get reportable() {
      return (
        finishedSending.length +
        finishedReceiving.length +
        failedReceiving.length +
        failedBlockIds.length
      );
    },
    outstanding: () => ({ loads: requests.size, loading: loading.size }),
    async settled() {
      await Promise.all(loading.values());
    },
  };
}
