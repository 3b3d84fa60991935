import {
  type ConnectorModule,
  KvError,
  type KvTransferConfig,
  type KvTransferParams,
  type MatchedTokens,
  type SchedulerConnector,
  type SchedulerOptions,
  type WorkerConnector,
} from "@kv/interface";
import { compositeScheduler, compositeWorker, orClose } from "./composite.js";
import { readTransferConfig } from "./config/transfer-config.js";
import { type ConnectorRegistry, resolveConnector } from "./registry/registry.js";

/** vLLM's name in `kv_connector`. */
const NAME = "MultiConnector";
/** Each connector listens on the configured port plus this for each one before it. */
const PORT_OFFSET = 100;
/** Under this key, a step names requests whose blocks several connectors keep. */
const KEEPERS = "keepers";

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
  return {
    name: NAME,
    createScheduler: async (options) => {
      const schedulers: SchedulerConnector[] = [];
      for (const [index, { module, config }] of (
        await partsOf(options.config, resolve)
      ).entries()) {
        const { sideChannelPort: port } = config;
        const own = { ...config, sideChannelPort: port === 0 ? 0 : port + index * PORT_OFFSET };
        schedulers.push(
          await orClose(schedulers, () => module.createScheduler({ ...options, config: own })),
        );
      }
      return multiScheduler(schedulers, options);
    },
    createWorker: async (options) => {
      const workers: WorkerConnector[] = [];
      for (const { module, config } of await partsOf(options.config, resolve))
        workers.push(await orClose(workers, () => module.createWorker({ ...options, config })));
      return multiWorker(workers);
    },
  };
}

interface Part {
  readonly module: ConnectorModule;
  readonly config: KvTransferConfig;
}

/** Errors: `KV_CONFIG_INVALID`, and those of `readTransferConfig` and of the registry. */
function partsOf(
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
    connectors.map(async (given: unknown): Promise<Part> => {
      const { sideChannelHost, sideChannelPort, engineId, env } = config;
      const read = readTransferConfig(given, { env });
      const own = {
        ...read,
        sideChannelHost,
        sideChannelPort,
        engineId: read.engineId ?? engineId,
        env,
      };
      return { module: await resolve(own), config: own };
    }),
  );
}

/** The connectors by their keys in metadata. */
const byKey = <T>(parts: readonly T[]): Readonly<Record<string, T>> =>
  Object.fromEntries(parts.map((part, index) => [`connector ${index}`, part]));

/**
 * The scheduler side: the first connector that has some of a prompt loads it, and each of them may
 * save it.
 */
function multiScheduler(
  parts: readonly SchedulerConnector[],
  { config }: Pick<SchedulerOptions, "config">,
): SchedulerConnector {
  const all = compositeScheduler(NAME, byKey(parts));
  /** The connector that loads a request's KV, of requests that have not ended. */
  const loaders = new Map<string, SchedulerConnector>();
  /**
   * Connectors that keep an ended request's blocks, where they are more than one; since the last
   * step.
   */
  let keepers: Record<string, number> = {};
  return {
    ...all,
    loadFailurePolicy: config.loadFailurePolicy,
    requestQueued(request) {
      for (const part of parts) part.requestQueued?.(request);
    },
    tokensToPrefill(request) {
      const tokens = parts.map(
        (part) => part.tokensToPrefill?.(request) ?? request.numPromptTokens,
      );
      return Math.min(...tokens);
    },
    matchedTokens(request, ...computed) {
      let chosen: MatchedTokens = { tokens: 0, async: false };
      loaders.delete(request.requestId);
      for (const part of parts) {
        const matched = part.matchedTokens(request, ...computed);
        if (matched.wait === true) return matched;
        if (chosen.tokens > 0 || matched.tokens === 0) continue;
        chosen = matched;
        loaders.set(request.requestId, part);
      }
      return chosen;
    },
    cacheHitSource: (request) =>
      loaders.get(request.requestId)?.cacheHitSource?.(request) ?? "external_unspecified",
    firstToken: (request) => loaders.get(request.requestId)?.firstToken?.(request),
    afterAllocation(request, blockIds, externalTokens, computedTokens) {
      const loader = loaders.get(request.requestId);
      for (const part of parts)
        part.afterAllocation(
          request,
          blockIds,
          part === loader ? externalTokens : 0,
          computedTokens,
        );
    },
    buildStepMetadata() {
      const step = { ...all.buildStepMetadata(), [KEEPERS]: keepers };
      keepers = {};
      return step;
    },
    requestFinished(request, blockIds, reason) {
      const { requestId } = request;
      loaders.delete(requestId);
      const finished = parts.map((part) => part.requestFinished(request, blockIds, reason));
      const count = finished.filter(({ keepBlocks }) => keepBlocks).length;
      if (count > 1) keepers[requestId] = count;
      const params = finished.flatMap(({ kvTransferParams }) =>
        kvTransferParams === undefined ? [] : [kvTransferParams],
      );
      return {
        keepBlocks: count > 0,
        ...(params.length === 0 ? {} : { kvTransferParams: together(params) }),
      };
    },
    hasPendingWork: () => Object.keys(keepers).length > 0 || all.hasPendingWork(),
    async close() {
      loaders.clear();
      await all.close();
    },
  };
}

/** Errors: `KV_CONFIG_INVALID` for two connectors that answer the same parameter, as in vLLM. */
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
 * The worker side: a request whose blocks several connectors keep is reported when the last of them
 * has.
 */
function multiWorker(workers: readonly WorkerConnector[]): WorkerConnector {
  const all = compositeWorker(NAME, byKey(workers));
  /** Reports of a request to come, of requests that several connectors keep. */
  const awaited = new Map<string, number>();
  const isLast = (requestId: string) => {
    const left = (awaited.get(requestId) ?? 1) - 1;
    if (left === 0) awaited.delete(requestId);
    else awaited.set(requestId, left);
    return left === 0;
  };
  return {
    ...all,
    startLoad(step) {
      for (const [requestId, count] of Object.entries(
        (step[KEEPERS] ?? {}) as Record<string, number>,
      ))
        awaited.set(requestId, count);
      all.startLoad(step);
    },
    collectFinished() {
      const output = all.collectFinished();
      return {
        ...output,
        finishedSending: output.finishedSending.filter(isLast),
        finishedReceiving: output.finishedReceiving.filter(isLast),
      };
    },
    outstanding: () => ({ ...all.outstanding(), awaited: awaited.size }),
  };
}
