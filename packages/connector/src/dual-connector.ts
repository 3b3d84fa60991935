import type {
  ConnectorModule,
  ConnectorRequest,
  SchedulerConnector,
  SchedulerOptions,
  WorkerConnector,
  WorkerOptions,
} from "@kv/interface";
import type { TransferMode } from "@kv/protocol";
import { compositeScheduler, compositeWorker, orClose } from "./composite.js";

/** Options of `dualConnector`. */
export interface DualConnectorOptions {
  /** The connector's name in step metadata and errors. */
  readonly name: string;
  /** The connector of requests whose blocks D reads. */
  readonly pull: ConnectorModule;
  /** The connector of requests whose blocks P writes. */
  readonly push: ConnectorModule;
  /**
   * Returns the mode of a request whose `kv_transfer_params` have no `transfer_mode`. Must return
   * the same mode for the same request.
   */
  prefer(request: ConnectorRequest): TransferMode;
}

/** Push listens on the configured port plus this; pull listens on the configured port. */
const PUSH_PORT_OFFSET = 100;

/**
 * Pull and push in one engine: each request uses the connector that its `transfer_mode` names. D's
 * requests get the mode from P's response. Each connector has its own agents, side channel and
 * tables; they share the registered memory and nothing else.
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
  const push = await orClose([pull], () =>
    modules.push.createScheduler({ ...options, config: { ...config, sideChannelPort: pushPort } }),
  );
  const both = { pull, push };
  const of = (request: ConnectorRequest) => both[modeOf(request, prefer)];
  return {
    ...compositeScheduler(name, both),
    loadFailurePolicy: config.loadFailurePolicy,
    requestQueued: (request) => of(request).requestQueued?.(request),
    cacheHitSource: (request) => of(request).cacheHitSource?.(request) ?? "external_unspecified",
    firstToken: (request) => of(request).firstToken?.(request),
    tokensToPrefill: (request) => of(request).tokensToPrefill?.(request) ?? request.numPromptTokens,
    matchedTokens: (request, ...computed) => of(request).matchedTokens(request, ...computed),
    afterAllocation: (request, blockIds, ...tokens) =>
      of(request).afterAllocation(request, blockIds, ...tokens),
    requestFinished: (request, blockIds, reason) =>
      of(request).requestFinished(request, blockIds, reason),
  };
}

async function createWorker(
  name: string,
  modules: Pick<DualConnectorOptions, TransferMode>,
  options: WorkerOptions,
): Promise<WorkerConnector> {
  const pull = await modules.pull.createWorker(options);
  const push = await orClose([pull], () => modules.push.createWorker(options));
  return compositeWorker(name, { pull, push });
}

/** D's parameters without a mode come from a P that serves pull, as vLLM's do. */
function modeOf(request: ConnectorRequest, prefer: DualConnectorOptions["prefer"]): TransferMode {
  const { transfer_mode: mode, do_remote_prefill: consumes } = request.kvTransferParams ?? {};
  if (mode === "pull" || mode === "push") return mode;
  return consumes === true ? "pull" : prefer(request);
}
