import {
  type CacheHitSource,
  type ConnectorModule,
  type ConnectorRequest,
  KvError,
  type KvTransferConfig,
  type KvTransferParams,
  type SchedulerConnector,
  type SchedulerOptions,
  type WorkerConnector,
  type WorkerOutput,
} from "@kv/interface";
import { compositeWorker, orClose, payloadOf, summed } from "./composite.js";
import { readTransferConfig } from "./config/transfer-config.js";
import { resolveConnector } from "./registry/registry.js";

/** vLLM's name in `kv_connector`. */
const NAME = "MultiConnector";
/** Each connector listens on the configured port plus this for each one before it. */
const PORT_OFFSET = 100;
/** Under this key, a step names requests whose blocks several connectors keep. */
const KEEPERS = "keepers";

/**
 * Several connectors in one engine, as vLLM's `MultiConnector`: a request's KV is loaded by the first that has some of the prompt, in the order of the
 * configuration, and saved by all. `kv_connector_extra_config.connectors` lists a `kv_transfer_config` for each. Blocks that several of them keep are given
 * back when the last one has reported the request. Register it under vLLM's name: `registerConnector("MultiConnector", async () => multiConnector)`.
 */
export const multiConnector: ConnectorModule = {
  name: NAME,
  createScheduler: async (options) => {
    const parts = await partsOf(options.config);
    const schedulers: SchedulerConnector[] = [];
    for (const [index, { module, config }] of parts.entries()) {
      const { sideChannelPort: port } = config;
      const own = { ...config, sideChannelPort: port === 0 ? 0 : port + index * PORT_OFFSET };
      schedulers.push(await orClose(schedulers, () => module.createScheduler({ ...options, config: own })));
    }
    return new MultiScheduler(schedulers, options);
  },
  createWorker: async (options) => {
    const parts = await partsOf(options.config);
    const workers: WorkerConnector[] = [];
    for (const { module, config } of parts)
      workers.push(await orClose(workers, () => module.createWorker({ ...options, config })));
    return multiWorker(workers);
  },
};

interface Part {
  readonly module: ConnectorModule;
  readonly config: KvTransferConfig;
}

/** Errors: `KV_CONFIG_INVALID`, and those of `readTransferConfig` and of the registry. */
function partsOf(config: KvTransferConfig): Promise<readonly Part[]> {
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
      const read = readTransferConfig(given, { env: Object.fromEntries(known(env)) });
      const own = { ...read, sideChannelHost, sideChannelPort, engineId: read.engineId ?? engineId, env };
      return { module: await resolveConnector(own), config: own };
    }),
  );
}

const known = (env: KvTransferConfig["env"]): [string, string][] =>
  Object.entries(env).flatMap(([name, value]) => (value === undefined ? [] : [[name, value]]));

const keyOf = (index: number) => `connector ${index}`;

class MultiScheduler implements SchedulerConnector {
  readonly name = NAME;
  readonly loadFailurePolicy: SchedulerConnector["loadFailurePolicy"];
  readonly #parts: readonly SchedulerConnector[];
  /** The connector that loads a request's KV, of requests that have not ended. */
  readonly #loaders = new Map<string, SchedulerConnector>();
  /** Connectors that keep an ended request's blocks, where they are more than one; since the last step. */
  #keepers: Record<string, number> = {};
  #step = 0;

  constructor(parts: readonly SchedulerConnector[], { config }: Pick<SchedulerOptions, "config">) {
    this.#parts = parts;
    this.loadFailurePolicy = config.loadFailurePolicy;
  }

  async setHandshakeMetadata(
    workers: Parameters<SchedulerConnector["setHandshakeMetadata"]>[0],
  ): Promise<void> {
    for (const [index, part] of this.#parts.entries())
      await part.setHandshakeMetadata(workers.map((worker) => payloadOf(worker, keyOf(index))));
  }

  requestQueued(request: ConnectorRequest): void {
    for (const part of this.#parts) part.requestQueued?.(request);
  }

  tokensToPrefill(request: ConnectorRequest): number {
    const tokens = this.#parts.map((part) => part.tokensToPrefill?.(request) ?? request.numPromptTokens);
    return Math.min(...tokens);
  }

  matchedTokens(
    ...given: Parameters<SchedulerConnector["matchedTokens"]>
  ): ReturnType<SchedulerConnector["matchedTokens"]> {
    const [{ requestId }] = given;
    let chosen: ReturnType<SchedulerConnector["matchedTokens"]> = { tokens: 0, async: false };
    this.#loaders.delete(requestId);
    for (const part of this.#parts) {
      const matched = part.matchedTokens(...given);
      if (matched.wait === true) return matched;
      if (chosen.tokens > 0 || matched.tokens === 0) continue;
      chosen = matched;
      this.#loaders.set(requestId, part);
    }
    return chosen;
  }

  cacheHitSource(request: ConnectorRequest): CacheHitSource {
    return this.#loaders.get(request.requestId)?.cacheHitSource?.(request) ?? "external_unspecified";
  }

  afterAllocation(...given: Parameters<SchedulerConnector["afterAllocation"]>): void {
    const [request, blockIds, externalTokens, computedTokens] = given;
    const loader = this.#loaders.get(request.requestId);
    for (const part of this.#parts)
      part.afterAllocation(request, blockIds, part === loader ? externalTokens : 0, computedTokens);
  }

  buildStepMetadata(): ReturnType<SchedulerConnector["buildStepMetadata"]> {
    this.#step += 1;
    const steps = this.#parts.map((part, index) => [keyOf(index), part.buildStepMetadata()]);
    const keepers = this.#keepers;
    this.#keepers = {};
    return { connector: NAME, step: this.#step, [KEEPERS]: keepers, ...Object.fromEntries(steps) };
  }

  requestFinished(
    ...given: Parameters<SchedulerConnector["requestFinished"]>
  ): ReturnType<SchedulerConnector["requestFinished"]> {
    const [{ requestId }] = given;
    this.#loaders.delete(requestId);
    const finished = this.#parts.map((part) => part.requestFinished(...given));
    const keepers = finished.filter(({ keepBlocks }) => keepBlocks).length;
    if (keepers > 1) this.#keepers[requestId] = keepers;
    const params = finished.flatMap(({ kvTransferParams }) =>
      kvTransferParams === undefined ? [] : [kvTransferParams],
    );
    return {
      keepBlocks: keepers > 0,
      ...(params.length === 0 ? {} : { kvTransferParams: together(params) }),
    };
  }

  applyWorkerOutput(output: WorkerOutput): void {
    // Each connector ignores the requests that it does not know.
    const data = output.connectorData as Readonly<Record<string, unknown>> | undefined;
    for (const [index, part] of this.#parts.entries())
      part.applyWorkerOutput({ ...output, connectorData: data?.[keyOf(index)] });
  }

  hasPendingWork(): boolean {
    return Object.keys(this.#keepers).length > 0 || this.#parts.some((part) => part.hasPendingWork());
  }

  outstanding(): Readonly<Record<string, number>> {
    return summed(this.#parts.map((part) => part.outstanding()));
  }

  async close(): Promise<void> {
    this.#loaders.clear();
    await Promise.all(this.#parts.map((part) => part.close()));
  }
}

/** Errors: `KV_CONFIG_INVALID` for two connectors that answer the same parameter, as in vLLM. */
function together(params: readonly KvTransferParams[]): KvTransferParams {
  const merged: Record<string, unknown> = {};
  for (const [key, value] of params.flatMap((each) => Object.entries(each))) {
    if (key in merged) {
      throw new KvError(
        "KV_CONFIG_INVALID",
        `two connectors of ${NAME} answer ${key} in kv_transfer_params: a decode worker could read only one`,
        { hint: "configure one connector that hands requests over, and others that only load or store" },
      );
    }
    merged[key] = value;
  }
  return merged;
}

/** The worker side: a request whose blocks several connectors keep is reported when the last of them has. */
function multiWorker(workers: readonly WorkerConnector[]): WorkerConnector {
  const all = compositeWorker(
    NAME,
    Object.fromEntries(workers.map((worker, index) => [keyOf(index), worker])),
  );
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
      for (const [requestId, count] of Object.entries((step[KEEPERS] ?? {}) as Record<string, number>))
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
