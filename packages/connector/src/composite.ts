import {
  KvError,
  type SchedulerConnector,
  type StepMetadata,
  type WorkerConnector,
  type WorkerHandshakeMetadata,
  type WorkerOutput,
} from "@kv/interface";
import { decodeMsgpack, encodeMsgpack } from "@kv/protocol";

// What a connector that consists of others does on both sides. Each of the others has a key: its
// metadata of a step and of a handshake has that name.

/**
 * What the scheduler sides of several connectors do as one, by key, whichever of them serves a
 * request.
 */
export function compositeScheduler(
  name: string,
  schedulers: Readonly<Record<string, SchedulerConnector>>,
): Pick<
  SchedulerConnector,
  | "name"
  | "setHandshakeMetadata"
  | "buildStepMetadata"
  | "applyWorkerOutput"
  | "hasPendingWork"
  | "outstanding"
  | "close"
> {
  const all = Object.entries(schedulers);
  const each = all.map(([, scheduler]) => scheduler);
  let step = 0;
  return {
    name,
    async setHandshakeMetadata(workers) {
      for (const [key, scheduler] of all)
        await scheduler.setHandshakeMetadata(workers.map((worker) => payloadOf(worker, key)));
    },
    buildStepMetadata() {
      step += 1;
      const steps = all.map(([key, scheduler]) => [key, scheduler.buildStepMetadata()] as const);
      return { connector: name, step, ...Object.fromEntries(steps) };
    },
    applyWorkerOutput(output) {
      // Each connector ignores the requests that it does not know.
      const data = output.connectorData as Readonly<Record<string, unknown>> | undefined;
      for (const [key, scheduler] of all)
        scheduler.applyWorkerOutput({ ...output, connectorData: data?.[key] });
    },
    hasPendingWork: () => each.some((scheduler) => scheduler.hasPendingWork()),
    outstanding: () => summed(each.map((scheduler) => scheduler.outstanding())),
    async close() {
      await Promise.all(each.map((scheduler) => scheduler.close()));
    },
  };
}

/**
 * The worker sides of several connectors as one, by key. A step, a layer and a save go to each of
 * them, and their reports are merged.
 */
export function compositeWorker(
  name: string,
  workers: Readonly<Record<string, WorkerConnector>>,
): WorkerConnector {
  const all = Object.entries(workers);
  const each = all.map(([, worker]) => worker);
  const sleeps = each.every(({ unregisterKvCaches }) => unregisterKvCaches !== undefined);
  return {
    name,
    async registerKvCaches(caches) {
      for (const worker of each) await worker.registerKvCaches(caches);
    },
    ...(sleeps
      ? {
          async unregisterKvCaches() {
            await Promise.all(each.map((worker) => worker.unregisterKvCaches?.()));
          },
        }
      : {}),
    async handshakeMetadata() {
      const told = await Promise.all(each.map((worker) => worker.handshakeMetadata()));
      const payloads = Object.fromEntries(all.map(([key], index) => [key, told[index]?.payload]));
      const { tpRank = 0, ppRank = 0 } = told[0] ?? {};
      return { tpRank, ppRank, payload: encodeMsgpack(payloads) };
    },
    startLoad(step) {
      for (const [key, worker] of all) worker.startLoad(stepOf(step, key));
    },
    layerComputed(layer) {
      for (const worker of each) worker.layerComputed?.(layer);
    },
    async waitForSave(step, computedTokens) {
      await Promise.all(
        all.map(([key, worker]) => worker.waitForSave(stepOf(step, key), computedTokens)),
      );
    },
    collectFinished(): WorkerOutput {
      const outputs = each.map((worker) => worker.collectFinished());
      const unverifiedReceiving = outputs.flatMap((output) => output.unverifiedReceiving ?? []);
      const data = all.map(([key], index) => [key, outputs[index]?.connectorData] as const);
      const hasData = data.some(([, one]) => one !== undefined);
      return {
        ...(hasData ? { connectorData: Object.fromEntries(data) } : {}),
        ...(unverifiedReceiving.length === 0 ? {} : { unverifiedReceiving }),
        finishedSending: outputs.flatMap(({ finishedSending }) => finishedSending),
        finishedReceiving: outputs.flatMap(({ finishedReceiving }) => finishedReceiving),
        failedReceiving: outputs.flatMap(({ failedReceiving }) => failedReceiving),
        failedBlockIds: outputs.flatMap(({ failedBlockIds }) => failedBlockIds),
      };
    },
    onProgress(listener) {
      for (const worker of each) worker.onProgress(listener);
    },
    outstanding: () => summed(each.map((worker) => worker.outstanding())),
    async close() {
      await Promise.all(each.map((worker) => worker.close()));
    },
  };
}

/** Returns the result of `create`. When it fails, closes those before. */
export async function orClose<T>(
  before: readonly { close(): Promise<void> }[],
  create: () => Promise<T> | T,
): Promise<T> {
  try {
    return await create();
  } catch (error) {
    await Promise.all(before.map((one) => one.close()));
    throw error;
  }
}

/** The handshake metadata of one of the connectors. */
function payloadOf(worker: WorkerHandshakeMetadata, key: string): WorkerHandshakeMetadata {
  const payloads = decodeMsgpack(
    worker.payload,
    "handshake metadata of several connectors",
  ) as Record<string, Uint8Array>;
  return { ...worker, payload: payloads[key] ?? new Uint8Array() };
}

function stepOf(step: StepMetadata, key: string): StepMetadata {
  const own = step[key];
  if (typeof own === "object" && own !== null) return own as StepMetadata;
  throw new KvError(
    "KV_INTERNAL",
    `step ${step.step} of connector "${step.connector}" has no metadata for ${key}`,
  );
}

/** The sums of counts, by name. */
function summed(counts: readonly Readonly<Record<string, number>>[]): Record<string, number> {
  const sum: Record<string, number> = {};
  for (const each of counts) {
    for (const [what, count] of Object.entries(each)) sum[what] = (sum[what] ?? 0) + count;
  }
  return sum;
}
