import {
  type ConnectorModule,
  type ConnectorRequest,
  KvError,
  type SchedulerConnector,
  type SchedulerOptions,
  type StepMetadata,
  type WorkerConnector,
  type WorkerHandshakeMetadata,
  type WorkerOptions,
  type WorkerOutput,
} from "@kv/interface";
import { decodeMsgpack, encodeMsgpack, type TransferMode } from "@kv/protocol";

/** Options of `dualConnector`. */
export interface DualConnectorOptions {
  /** The connector's name in step metadata and errors. */
  readonly name: string;
  /** The connector of requests whose blocks D reads. */
  readonly pull: ConnectorModule;
  /** The connector of requests whose blocks P writes. */
  readonly push: ConnectorModule;
  /** Returns the mode of a request whose `kv_transfer_params` have no `transfer_mode`. Must return the same mode for the same request. */
  prefer(request: ConnectorRequest): TransferMode;
}

/** Push listens on the configured port plus this; pull listens on the configured port. */
const PUSH_PORT_OFFSET = 100;
const MODES = ["pull", "push"] as const;

/**
 * Pull and push in one engine: each request uses the connector that its `transfer_mode` names. D's requests get the mode from P's response. Each
 * connector has its own agents, side channel and tables; they share the registered memory and nothing else.
 */
export function dualConnector(options: DualConnectorOptions): ConnectorModule {
  const { name, prefer } = options;
  return {
    name,
    createScheduler: (engine) => createScheduler(name, prefer, options, engine),
    createWorker: (engine) => createWorker(name, options, engine),
  };
}

async function createScheduler(
  name: string,
  prefer: DualConnectorOptions["prefer"],
  modules: Pick<DualConnectorOptions, TransferMode>,
  options: SchedulerOptions,
): Promise<SchedulerConnector> {
  const { config } = options;
  const { sideChannelPort } = config;
  const pull = await modules.pull.createScheduler(options);
  const pushPort = sideChannelPort === 0 ? 0 : sideChannelPort + PUSH_PORT_OFFSET;
  const push = await orClose(pull, () =>
    modules.push.createScheduler({ ...options, config: { ...config, sideChannelPort: pushPort } }),
  );
  const both = { pull, push };
  const of = (request: ConnectorRequest) => both[modeOf(request, prefer)];
  let step = 0;
  return {
    name,
    loadFailurePolicy: config.loadFailurePolicy,
    async setHandshakeMetadata(workers) {
      for (const mode of MODES) {
        await both[mode].setHandshakeMetadata(workers.map((worker) => payloadOf(worker, mode)));
      }
    },
    requestQueued: (request) => of(request).requestQueued?.(request),
    tokensToPrefill: (request) => of(request).tokensToPrefill?.(request) ?? request.numPromptTokens,
    matchedTokens: (request, ...computed) => of(request).matchedTokens(request, ...computed),
    afterAllocation: (request, blockIds, ...tokens) =>
      of(request).afterAllocation(request, blockIds, ...tokens),
    requestFinished: (request, blockIds, reason) => of(request).requestFinished(request, blockIds, reason),
    buildStepMetadata() {
      step += 1;
      return { connector: name, step, pull: pull.buildStepMetadata(), push: push.buildStepMetadata() };
    },
    applyWorkerOutput(output) {
      // Each connector ignores the requests that it does not know.
      const data = output.connectorData as Partial<Record<TransferMode, unknown>> | undefined;
      for (const mode of MODES) both[mode].applyWorkerOutput({ ...output, connectorData: data?.[mode] });
    },
    hasPendingWork: () => pull.hasPendingWork() || push.hasPendingWork(),
    outstanding: () => summed([pull.outstanding(), push.outstanding()]),
    async close() {
      await Promise.all([pull.close(), push.close()]);
    },
  };
}

async function createWorker(
  name: string,
  modules: Pick<DualConnectorOptions, TransferMode>,
  options: WorkerOptions,
): Promise<WorkerConnector> {
  const pull = await modules.pull.createWorker(options);
  const push = await orClose(pull, () => modules.push.createWorker(options));
  return {
    name,
    async registerKvCaches(caches) {
      await pull.registerKvCaches(caches);
      await push.registerKvCaches(caches);
    },
    async handshakeMetadata() {
      const [pulled, pushed] = await Promise.all([pull.handshakeMetadata(), push.handshakeMetadata()]);
      return { ...pulled, payload: encodeMsgpack({ pull: pulled.payload, push: pushed.payload }) };
    },
    startLoad(step) {
      pull.startLoad(stepOf(step, "pull"));
      push.startLoad(stepOf(step, "push"));
    },
    layerComputed(layer) {
      pull.layerComputed?.(layer);
      push.layerComputed?.(layer);
    },
    async waitForSave(step, computedTokens) {
      await Promise.all([
        pull.waitForSave(stepOf(step, "pull"), computedTokens),
        push.waitForSave(stepOf(step, "push"), computedTokens),
      ]);
    },
    collectFinished(): WorkerOutput {
      const [a, b] = [pull.collectFinished(), push.collectFinished()];
      const unverifiedReceiving = [...(a.unverifiedReceiving ?? []), ...(b.unverifiedReceiving ?? [])];
      const hasData = a.connectorData !== undefined || b.connectorData !== undefined;
      return {
        ...(hasData ? { connectorData: { pull: a.connectorData, push: b.connectorData } } : {}),
        ...(unverifiedReceiving.length === 0 ? {} : { unverifiedReceiving }),
        finishedSending: [...a.finishedSending, ...b.finishedSending],
        finishedReceiving: [...a.finishedReceiving, ...b.finishedReceiving],
        failedReceiving: [...a.failedReceiving, ...b.failedReceiving],
        failedBlockIds: [...a.failedBlockIds, ...b.failedBlockIds],
      };
    },
    onProgress(listener) {
      pull.onProgress(listener);
      push.onProgress(listener);
    },
    outstanding: () => summed([pull.outstanding(), push.outstanding()]),
    async close() {
      await Promise.all([pull.close(), push.close()]);
    },
  };
}

/** D's parameters without a mode come from a P that serves pull, as vLLM's do. */
function modeOf(request: ConnectorRequest, prefer: DualConnectorOptions["prefer"]): TransferMode {
  const { transfer_mode: mode, do_remote_prefill: consumes } = request.kvTransferParams ?? {};
  if (mode === "pull" || mode === "push") return mode;
  return consumes === true ? "pull" : prefer(request);
}

/** Returns the result of `create`. When it fails, closes `first`. */
async function orClose<T>(first: { close(): Promise<void> }, create: () => Promise<T> | T): Promise<T> {
  try {
    return await create();
  } catch (error) {
    await first.close();
    throw error;
  }
}

function payloadOf(worker: WorkerHandshakeMetadata, mode: TransferMode): WorkerHandshakeMetadata {
  const both = decodeMsgpack(worker.payload, "handshake metadata of both connectors") as Record<
    TransferMode,
    Uint8Array
  >;
  return { ...worker, payload: both[mode] };
}

function stepOf(step: StepMetadata, mode: TransferMode): StepMetadata {
  const own = step[mode];
  if (typeof own === "object" && own !== null) return own as StepMetadata;
  throw new KvError(
    "KV_INTERNAL",
    `step ${step.step} of connector "${step.connector}" has no metadata for ${mode}`,
  );
}

function summed(counts: readonly Readonly<Record<string, number>>[]): Record<string, number> {
  const sum: Record<string, number> = {};
  for (const each of counts) {
    for (const [what, count] of Object.entries(each)) sum[what] = (sum[what] ?? 0) + count;
  }
  return sum;
}
