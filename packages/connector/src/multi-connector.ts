import {
  type ConnectorModule,
  type ConnectorRequest,
  KvError,
  type KvTransferConfig,
  type KvTransferParams,
  type MatchedTokens,
  type SchedulerConnector,
  type StepMetadata,
  settleAll,
  type WorkerConnector,
  type WorkerHandshakeMetadata,
  type WorkerOutput,
} from "@kv/interface";
import { decodeMsgpack, encodeMsgpack, type TransferMode } from "@kv/protocol";
import { readTransferConfig } from "./config/transfer-config.js";
import { type ConnectorRegistry, resolveConnector } from "./registry/registry.js";
import { withUnverified } from "./worker/connector-worker.js";

const NAME = "MultiConnector";
/** Added to the configured port for each connector before. */
const PORT_OFFSET = 100;
/** Step key of who keeps blocks, by request. */
const KEEPERS = "keepers";
/** Step key of who loads a request's KV. Only its reports of the request are believed. */
const LOADERS = "loaders";

interface Part {
  readonly key: string;
  readonly module: ConnectorModule;
  readonly config: KvTransferConfig;
}

type Route = (request: ConnectorRequest) => number;

/** Options of `dualConnector`. */
export interface DualConnectorOptions {
  readonly name: string;
  /** Serves requests whose blocks D reads. */
  readonly pull: ConnectorModule;
  /** Serves requests whose blocks P writes. */
  readonly push: ConnectorModule;
  /** Chooses where `kv_transfer_params` have no `transfer_mode`. Must be stable per request. */
  prefer(request: ConnectorRequest): TransferMode;
}

/**
 * Pull and push in one engine: each request's `transfer_mode` selects the connector. The two share
 * only the registered memory. Push listens on the configured port plus 100.
 */
export function dualConnector(options: DualConnectorOptions): ConnectorModule {
  const { name, prefer } = options;
  const modes = ["pull", "push"] as const;
  const partsOf = (config: KvTransferConfig) =>
    modes.map((key) => ({ key, module: options[key], config }));
  return connectorOf(name, partsOf, (request) => {
    const { transfer_mode: mode, do_remote_prefill: consumes } = request.kvTransferParams ?? {};
    if (mode === "pull" || mode === "push") return modes.indexOf(mode);
    // Parameters without a mode come from a P that serves pull, as vLLM's do.
    return modes.indexOf(consumes === true ? "pull" : prefer(request));
  });
}

/**
 * Several connectors in one engine, as vLLM's `MultiConnector`: the first that has some of the
 * prompt loads it, and all save it. `kv_connector_extra_config.connectors` lists a
 * `kv_transfer_config` for each. Blocks go back when their last keeper has reported the request.
 * Register it with `registerConnector("MultiConnector", async () => multiConnector)`.
 */
export const multiConnector: ConnectorModule = multiConnectorOf(resolveConnector);

/**
 * `multiConnector` for a registry of your own, whose `resolve` finds the connectors. Throws
 * nothing.
 */
export function multiConnectorOf(resolve: ConnectorRegistry["resolve"]): ConnectorModule {
  return connectorOf(NAME, (config) => configuredParts(config, resolve));
}

/**
 * Returns an object that delegates to `target`, except for `overrides`. Spreading a connector into
 * a literal would lose its class's methods. Throws nothing.
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

/** Closes the earlier ones when one cannot be created. */
async function openAll<T extends { close(): Promise<void> }>(
  parts: readonly Part[],
  open: (part: Part, index: number) => T | Promise<T>,
): Promise<readonly Keyed<T>[]> {
  const opened: Keyed<T>[] = [];
  try {
    for (const [index, part] of parts.entries()) opened.push([part.key, await open(part, index)]);
    return opened;
  } catch (error) {
    await settleAll(opened.map(([, one]) => one.close())).catch(() => {});
    throw error;
  }
}

type Loaders = Record<string, string>;

interface Load {
  readonly part: SchedulerConnector;
  readonly isAsync: boolean;
  isArriving: boolean;
}

type Keyed<T> = readonly [key: string, connector: T];

function multiScheduler(
  name: string,
  keyed: readonly Keyed<SchedulerConnector>[],
  { loadFailurePolicy }: KvTransferConfig,
  route: Route | undefined,
): SchedulerConnector {
  const all = keyed.map(([, scheduler]) => scheduler);
  const keyOf = new Map(keyed.map(([key, scheduler]) => [scheduler, key]));
  const loads = new Map<string, Load>();
  const kept = new Map<string, readonly string[]>();
  /** Since the last step. */
  let news = { [KEEPERS]: {} as Record<string, readonly string[]>, [LOADERS]: {} as Loaders };
  let step = 0;
  const servers = (request: ConnectorRequest) =>
    route === undefined ? all : all.slice(route(request), route(request) + 1);
  const loaderOf = (request: ConnectorRequest) =>
    route === undefined ? loads.get(request.requestId)?.part : all[route(request)];
  return {
    name,
    loadFailurePolicy,
    async setHandshakeMetadata(workers) {
      // New workers know none of them.
      news[KEEPERS] = Object.fromEntries(kept);
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
      const { requestId } = request;
      loads.delete(requestId);
      for (const part of servers(request)) {
        const matched = part.matchedTokens(request, ...computed);
        if (matched.wait === true) return matched;
        if (chosen.tokens > 0 || matched.tokens === 0) continue;
        chosen = matched;
        loads.set(requestId, { part, isAsync: matched.async, isArriving: false });
      }
      return chosen;
    },
    cacheHitSource: (request) =>
      loaderOf(request)?.cacheHitSource?.(request) ?? "external_unspecified",
    firstToken: (request) => loaderOf(request)?.firstToken?.(request),
    afterAllocation(request, blockIds, externalTokens, computedTokens) {
      const { requestId } = request;
      const loader = loaderOf(request);
      const load = loads.get(requestId);
      if (externalTokens > 0 && load?.isAsync === true) {
        load.isArriving = true;
        news[LOADERS][requestId] = keyOf.get(load.part) ?? "";
      }
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
        ...news,
      };
      news = { [KEEPERS]: {}, [LOADERS]: {} };
      return metadata;
    },
    requestFinished(request, blockIds, reason) {
      const { requestId } = request;
      const load = loads.get(requestId);
      loads.delete(requestId);
      const parts = servers(request);
      const finished = parts.map((part) => part.requestFinished(request, blockIds, reason));
      const keeping = parts.filter((_, index) => finished[index]?.keepBlocks === true);
      const arriving = load?.isArriving === true ? load.part : undefined;
      if (arriving === undefined || !keeping.includes(arriving)) delete news[LOADERS][requestId];
      // The loader still reports its blocks as received.
      const keepers = keeping.flatMap((part) => (part === arriving ? [] : (keyOf.get(part) ?? [])));
      if (keepers.length > 0) {
        kept.set(requestId, keepers);
        news[KEEPERS][requestId] = keepers;
      }
      const params = finished
        .map(({ kvTransferParams }) => kvTransferParams)
        .filter((given) => given !== undefined);
      return {
        keepBlocks: keeping.length > 0,
        ...(params.length === 0 ? {} : { kvTransferParams: together(params) }),
      };
    },
    applyWorkerOutput(output) {
      for (const requestId of output.finishedSending) kept.delete(requestId);
      for (const requestId of output.finishedReceiving) {
        kept.delete(requestId);
        const load = loads.get(requestId);
        if (load !== undefined) load.isArriving = false;
      }
      // Each connector ignores unknown requests.
      const data = output.connectorData as Readonly<Record<string, unknown>> | undefined;
      for (const [key, scheduler] of keyed)
        scheduler.applyWorkerOutput({ ...output, connectorData: data?.[key] });
    },
    hasPendingWork: () =>
      Object.keys(news[KEEPERS]).length > 0 || all.some((scheduler) => scheduler.hasPendingWork()),
    outstanding: () => summed(all.map((scheduler) => scheduler.outstanding())),
    async close() {
      loads.clear();
      kept.clear();
      await settleAll(all.map((scheduler) => scheduler.close()));
    },
  };
}

/** @throws `KV_CONFIG_INVALID` when two connectors answer the same parameter, as in vLLM. */
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
 * Believes of a request's KV only who loads it (vllm#53049), and of its blocks only who keeps them.
 * Reports them as free when the last keeper has.
 */
function multiWorker(name: string, keyed: readonly Keyed<WorkerConnector>[]): WorkerConnector {
  const all = keyed.map(([, worker]) => worker);
  const canSleep = all.every(({ unregisterKvCaches }) => unregisterKvCaches !== undefined);
  const loading = new Map<string, string>();
  const keeping = new Map<string, Set<string>>();
  const isFree = (requestId: string) => {
    if ((keeping.get(requestId)?.size ?? 0) > 0) return false;
    keeping.delete(requestId);
    return true;
  };
  const hasSent = (key: string) => (requestId: string) =>
    keeping.get(requestId)?.delete(key) === true && isFree(requestId);
  const hasReceived = (key: string, failed: WorkerOutput["failedReceiving"]) => {
    const isAtRisk = (id: string) =>
      failed.some(({ requestId, blocksAtRisk }) => requestId === id && blocksAtRisk === true);
    return (requestId: string) => {
      if (loading.get(requestId) !== key) return false;
      // The blocks are reported again when they are safe.
      if (isAtRisk(requestId)) return true;
      loading.delete(requestId);
      return isFree(requestId);
    };
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
      const loaders = Object.entries((step[LOADERS] ?? {}) as Loaders);
      for (const [requestId, key] of loaders) loading.set(requestId, key);
      const keepers = (step[KEEPERS] ?? {}) as Readonly<Record<string, readonly string[]>>;
      for (const [requestId, keys] of Object.entries(keepers))
        keeping.set(requestId, new Set(keys));
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
      const outputs = keyed.map(([key, worker]) => [key, worker.collectFinished()] as const);
      const unverified = new Set(
        outputs.flatMap(([key, { unverifiedReceiving = [] }]) =>
          unverifiedReceiving.filter((requestId) => loading.get(requestId) === key),
        ),
      );
      const failedReceiving = outputs.flatMap(([key, output]) =>
        output.failedReceiving.filter(({ requestId }) => loading.get(requestId) === key),
      );
      const data = outputs.map(([key, { connectorData }]) => [key, connectorData] as const);
      const hasData = data.some(([, one]) => one !== undefined);
      const output = {
        ...(hasData ? { connectorData: Object.fromEntries(data) } : {}),
        finishedSending: outputs.flatMap(([key, each]) =>
          each.finishedSending.filter(hasSent(key)),
        ),
        finishedReceiving: outputs.flatMap(([key, each]) =>
          each.finishedReceiving.filter(hasReceived(key, each.failedReceiving)),
        ),
        failedReceiving,
        failedBlockIds: outputs.flatMap(([, { failedBlockIds }]) => failedBlockIds),
      };
      return withUnverified(output, unverified);
    },
    onProgress(listener) {
      for (const worker of all) worker.onProgress(listener);
    },
    outstanding: () => ({
      ...summed(all.map((worker) => worker.outstanding())),
      loading: loading.size,
      keeping: keeping.size,
    }),
    async close() {
      await settleAll(all.map((worker) => worker.close()));
    },
  };
}

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

function summed(counts: readonly Readonly<Record<string, number>>[]): Record<string, number> {
  const sum: Record<string, number> = {};
  for (const each of counts) {
    for (const [what, count] of Object.entries(each)) sum[what] = (sum[what] ?? 0) + count;
  }
  return sum;
}
