import {
  type ConnectorModule,
  type ConnectorRequest,
  KvError,
  type KvTransferConfig,
  type KvTransferParams,
  type MatchedTokens,
  type SchedulerConnector,
  type StepMetadata,
  type WorkerConnector,
  type WorkerHandshakeMetadata,
} from "@kv/interface";
import { decodeMsgpack, encodeMsgpack, type TransferMode } from "@kv/protocol";
import { readTransferConfig } from "./config/transfer-config.js";
import { type ConnectorRegistry, resolveConnector } from "./registry/registry.js";

/** vLLM's name in `kv_connector`. */
const NAME = "MultiConnector";
/** Each connector listens on the configured port plus this for each one before it. */
const PORT_OFFSET = 100;
/** Under this key, a step names requests whose blocks several connectors keep. */
const KEEPERS = "keepers";

/** One of the connectors. Its metadata of a step and of a handshake has the name `key`. */
interface Part {
  readonly key: string;
  readonly module: ConnectorModule;
  readonly config: KvTransferConfig;
}

/** Returns the index of the one connector that serves a request. */
type Route = (request: ConnectorRequest) => number;

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

/**
 * Pull and push in one engine: each request uses the connector that its `transfer_mode` names. D's
 * requests get the mode from P's response. Each connector has its own agents, side channel and
 * tables; they share the registered memory and nothing else. Push listens on the configured port
 * plus 100.
 */
export function dualConnector(options: DualConnectorOptions): ConnectorModule {
  const { name, prefer } = options;
  const modes = ["pull", "push"] as const;
  const partsOf = (config: KvTransferConfig) =>
    modes.map((key) => ({ key, module: options[key], config }));
  return connectorOf(name, partsOf, (request) => {
    const { transfer_mode: mode, do_remote_prefill: consumes } = request.kvTransferParams ?? {};
    if (mode === "pull" || mode === "push") return modes.indexOf(mode);
    // D's parameters without a mode come from a P that serves pull, as vLLM's do.
    return modes.indexOf(consumes === true ? "pull" : prefer(request));
  });
}

/**
 * Several connectors in one engine, as vLLM's `MultiConnector`: a request's KV is loaded by the
 * first that has some of the prompt, in the order of the configuration, and saved by all.
 * `kv_connector_extra_config.connectors` lists a `kv_transfer_config` for each. Blocks that several
 * of them keep are given back when the last one has reported the request. Register it under vLLM's
 * name: `registerConnector("MultiConnector", async () => multiConnector)`.
 */
export const multiConnector: ConnectorModule = multiConnectorOf(resolveConnector);

/**
 * `multiConnector` of a program with a registry of its own: its `resolve` finds the connectors.
 * Throws nothing.
 */
export function multiConnectorOf(resolve: ConnectorRegistry["resolve"]): ConnectorModule {
  return connectorOf(NAME, (config) => configuredParts(config, resolve));
}

/**
 * Returns an object that delegates to `target`, except for the members in `overrides`. Use it to
 * wrap a scheduler or worker connector: spreading one (`{ ...worker, collectFinished }`) would lose
 * the methods of its class. Throws nothing.
 */
export function delegateTo<Target extends object>(
  target: Target,
  overrides: Partial<Target>,
): Target {
  return new Proxy(target, {
    get(_, key) {
      if (Object.hasOwn(overrides, key)) return Reflect.get(overrides, key) as unknown;
      const value: unknown = Reflect.get(target, key, target);
      return typeof value === "function" ? (value.bind(target) as unknown) : value;
    },
  });
}

/** @throws `KV_CONFIG_INVALID`, and those of `readTransferConfig` and of the registry. */
function configuredParts(
  config: KvTransferConfig,
  resolve: ConnectorRegistry["resolve"],
): Promise<readonly Part[]> {
  const { connectors } = config.extra;
  if (!Array.isArray(connectors) || connectors.length === 0) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `kv_connector_extra_config.connectors of ${NAME} is ${JSON.stringify(connectors)}, not a list of kv_transfer_configs`,
    );
  }
  return Promise.all(
    connectors.map(async (given: unknown, index): Promise<Part> => {
      const { sideChannelHost, sideChannelPort, engineId, env } = config;
      const read = readTransferConfig(given, { env });
      const own = {
        ...read,
        sideChannelHost,
        sideChannelPort,
        engineId: read.engineId ?? engineId,
        env,
      };
      return { key: `connector ${index}`, module: await resolve(own), config: own };
    }),
  );
}

/** With `route`, one connector serves a request; without, each of them may. */
function connectorOf(
  name: string,
  partsOf: (config: KvTransferConfig) => readonly Part[] | Promise<readonly Part[]>,
  route?: Route,
): ConnectorModule {
  return {
    name,
    async createScheduler(options) {
      const parts = await partsOf(options.config);
      const schedulers = await openAll(parts, ({ module, config }, index) => {
        const { sideChannelPort: port } = config;
        const own = { ...config, sideChannelPort: port === 0 ? 0 : port + index * PORT_OFFSET };
        return module.createScheduler({ ...options, config: own });
      });
      return multiScheduler(name, schedulers, options.config, route);
    },
    async createWorker(options) {
      const parts = await partsOf(options.config);
      const open = ({ module, config }: Part) => module.createWorker({ ...options, config });
      return multiWorker(name, await openAll(parts, open));
    },
  };
}

/** The parts' connectors by key. When one cannot be created, those before are closed. */
async function openAll<T extends { close(): Promise<void> }>(
  parts: readonly Part[],
  open: (part: Part, index: number) => T | Promise<T>,
): Promise<readonly Keyed<T>[]> {
  const opened: Keyed<T>[] = [];
  try {
    for (const [index, part] of parts.entries()) opened.push([part.key, await open(part, index)]);
    return opened;
  } catch (error) {
    await Promise.all(opened.map(([, one]) => one.close()));
    throw error;
  }
}

type Keyed<T> = readonly [key: string, connector: T];

/** The scheduler sides of several connectors as one. */
function multiScheduler(
  name: string,
  keyed: readonly Keyed<SchedulerConnector>[],
  { loadFailurePolicy }: KvTransferConfig,
  route: Route | undefined,
): SchedulerConnector {
  const all = keyed.map(([, scheduler]) => scheduler);
  /** The connector that loads a request's KV, of requests that have not ended. */
  const loaders = new Map<string, SchedulerConnector>();
  /** How many connectors keep an ended request's blocks, where several do; since the last step. */
  let keepers: Record<string, number> = {};
  let step = 0;
  /** The connectors that may serve a request. */
  const servers = (request: ConnectorRequest) =>
    route === undefined ? all : all.slice(route(request), route(request) + 1);
  const loaderOf = (request: ConnectorRequest) =>
    route === undefined ? loaders.get(request.requestId) : all[route(request)];
  return {
    name,
    loadFailurePolicy,
    async setHandshakeMetadata(workers) {
      for (const [key, scheduler] of keyed)
        await scheduler.setHandshakeMetadata(workers.map((worker) => payloadOf(worker, key)));
    },
    requestQueued(request) {
      for (const part of servers(request)) part.requestQueued?.(request);
    },
    tokensToPrefill(request) {
      const tokens = servers(request).map(
        (part) => part.tokensToPrefill?.(request) ?? request.numPromptTokens,
      );
      return Math.min(...tokens);
    },
    matchedTokens(request, ...computed) {
      let chosen: MatchedTokens = { tokens: 0, async: false };
      loaders.delete(request.requestId);
      for (const part of servers(request)) {
        const matched = part.matchedTokens(request, ...computed);
        if (matched.wait === true) return matched;
        if (chosen.tokens > 0 || matched.tokens === 0) continue;
        chosen = matched;
        loaders.set(request.requestId, part);
      }
      return chosen;
    },
    cacheHitSource: (request) =>
      loaderOf(request)?.cacheHitSource?.(request) ?? "external_unspecified",
    firstToken: (request) => loaderOf(request)?.firstToken?.(request),
    afterAllocation(request, blockIds, externalTokens, computedTokens) {
      const loader = loaderOf(request);
      for (const part of servers(request)) {
        const tokens = part === loader ? externalTokens : 0;
        part.afterAllocation(request, blockIds, tokens, computedTokens);
      }
    },
    buildStepMetadata() {
      step += 1;
      const steps = keyed.map(([key, scheduler]) => [key, scheduler.buildStepMetadata()] as const);
      const metadata = {
        connector: name,
        step,
        ...Object.fromEntries(steps),
        [KEEPERS]: keepers,
      };
      keepers = {};
      return metadata;
    },
    requestFinished(request, blockIds, reason) {
      const { requestId } = request;
      loaders.delete(requestId);
      const finished = servers(request).map((part) =>
        part.requestFinished(request, blockIds, reason),
      );
      const count = finished.filter(({ keepBlocks }) => keepBlocks).length;
      if (count > 1) keepers[requestId] = count;
      const params = finished
        .map(({ kvTransferParams }) => kvTransferParams)
        .filter((given) => given !== undefined);
      return {
        keepBlocks: count > 0,
        ...(params.length === 0 ? {} : { kvTransferParams: together(params) }),
      };
    },
    applyWorkerOutput(output) {
      // Each connector ignores the requests that it does not know.
      const data = output.connectorData as Readonly<Record<string, unknown>> | undefined;
      for (const [key, scheduler] of keyed)
        scheduler.applyWorkerOutput({ ...output, connectorData: data?.[key] });
    },
    hasPendingWork: () =>
      Object.keys(keepers).length > 0 || all.some((scheduler) => scheduler.hasPendingWork()),
    outstanding: () => summed(all.map((scheduler) => scheduler.outstanding())),
    async close() {
      loaders.clear();
      await Promise.all(all.map((scheduler) => scheduler.close()));
    },
  };
}

/** @throws `KV_CONFIG_INVALID` for two connectors that answer the same parameter, as in vLLM. */
function together(params: readonly KvTransferParams[]): KvTransferParams {
  const merged: Record<string, unknown> = {};
  for (const [key, value] of params.flatMap((each) => Object.entries(each))) {
    if (key in merged) {
      throw new KvError(
        "KV_CONFIG_INVALID",
        `two connectors of ${NAME} answer ${key} in kv_transfer_params: a decode worker could read only one`,
        {
          hint: "configure one connector that hands requests over, and others that only load or store",
        },
      );
    }
    merged[key] = value;
  }
  return merged;
}

/**
 * The worker sides of several connectors as one. A step, a layer and a save go to each of them. A
 * request whose blocks several connectors keep is reported when the last of them has.
 */
function multiWorker(name: string, keyed: readonly Keyed<WorkerConnector>[]): WorkerConnector {
  const all = keyed.map(([, worker]) => worker);
  const canSleep = all.every(({ unregisterKvCaches }) => unregisterKvCaches !== undefined);
  /** Reports of a request to come, of requests that several connectors keep. */
  const awaited = new Map<string, number>();
  const isLastReport = (requestId: string) => {
    const left = (awaited.get(requestId) ?? 1) - 1;
    if (left === 0) awaited.delete(requestId);
    else awaited.set(requestId, left);
    return left === 0;
  };
  const unregisterKvCaches = async () => {
    await Promise.all(all.map((worker) => worker.unregisterKvCaches?.()));
  };
  return {
    name,
    async registerKvCaches(caches) {
      for (const worker of all) await worker.registerKvCaches(caches);
    },
    ...(canSleep ? { unregisterKvCaches } : {}),
    async handshakeMetadata() {
      const told = await Promise.all(all.map((worker) => worker.handshakeMetadata()));
      const payloads = keyed.map(([key], index) => [key, told[index]?.payload] as const);
      const { tpRank = 0, ppRank = 0 } = told[0] ?? {};
      return { tpRank, ppRank, payload: encodeMsgpack(Object.fromEntries(payloads)) };
    },
    startLoad(step) {
      const keepers = (step[KEEPERS] ?? {}) as Record<string, number>;
      for (const [requestId, count] of Object.entries(keepers)) awaited.set(requestId, count);
      for (const [key, worker] of keyed) worker.startLoad(stepOf(step, key));
    },
    layerComputed(layer) {
      for (const worker of all) worker.layerComputed?.(layer);
    },
    async waitForSave(step, computed) {
      await Promise.all(
        keyed.map(([key, worker]) => worker.waitForSave(stepOf(step, key), computed)),
      );
    },
    collectFinished() {
      const outputs = all.map((worker) => worker.collectFinished());
      const unverifiedReceiving = outputs.flatMap((output) => output.unverifiedReceiving ?? []);
      const data = keyed.map(([key], index) => [key, outputs[index]?.connectorData] as const);
      const hasData = data.some(([, one]) => one !== undefined);
      return {
        ...(hasData ? { connectorData: Object.fromEntries(data) } : {}),
        ...(unverifiedReceiving.length === 0 ? {} : { unverifiedReceiving }),
        finishedSending: outputs.flatMap((output) => output.finishedSending).filter(isLastReport),
        finishedReceiving: outputs
          .flatMap((output) => output.finishedReceiving)
          .filter(isLastReport),
        failedReceiving: outputs.flatMap(({ failedReceiving }) => failedReceiving),
        failedBlockIds: outputs.flatMap(({ failedBlockIds }) => failedBlockIds),
      };
    },
    onProgress(listener) {
      for (const worker of all) worker.onProgress(listener);
    },
    outstanding: () => ({
      ...summed(all.map((worker) => worker.outstanding())),
      awaited: awaited.size,
    }),
    async close() {
      await Promise.all(all.map((worker) => worker.close()));
    },
  };
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
