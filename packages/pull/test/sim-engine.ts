import { cpuPlatform, createWorkerOutputAggregator, cudaPlatform, readTransferConfig } from "@kv/connector";
import {
  type Ambient,
  type ConnectorModule,
  type ConnectorRequest,
  type KvCacheConfig,
  KvError,
  type KvTransferParams,
  type Log,
  type MemoryType,
  type Metrics,
  noMetrics,
  type SideChannel,
  type Transport,
  type WorkerOutput,
} from "@kv/interface";
import {
  type MemoryHost,
  type MemoryNetwork,
  memorySideChannel,
  memoryTransport,
} from "@kv/transport-memory";
import { pullConnector } from "../src/index.js";
import { createBlockPool } from "./block-pool.js";
import { plainSideChannel } from "./plain-peer.js";
import { type Sabotage, sabotagedSideChannel, sabotagedTransport } from "./sabotage.js";
import { createSimRanks, type SimRanks } from "./sim-ranks.js";

/** What a proxy knows of a producer before it has answered: where both legs go out at once. */
export function coordinatesOf({ engineId, host, tpSize }: SimEngine, requestId: string): KvTransferParams {
  return {
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_engine_id: engineId,
    remote_request_id: requestId,
    remote_host: host.name,
    remote_port: 5600,
    tp_size: tpSize,
  };
}

/** An engine without a model: real connectors, real blocks, made-up KV. It lives on one host of a memory network, in its time. */
export interface SimEngine {
  readonly engineId: string;
  readonly host: MemoryHost;
  readonly tpSize: number;
  readonly alive: boolean;
  /** Computes a prompt and answers the parameters for the one who reads it. */
  prefill(request: SimRequest): Promise<KvTransferParams>;
  /** Receives a prompt's KV, and resolves when every byte of it is right. */
  decode(request: SimRequest & { params: KvTransferParams; cachedTokens?: number }): Promise<void>;
  abort(requestId: string): void;
  /** What is held, by name, blocks included; nothing but zeros when all requests are over. */
  outstanding(): Readonly<Record<string, number>>;
  /** As SIGKILL. */
  kill(): void;
  close(): Promise<void>;
}

export interface SimRequest {
  readonly requestId: string;
  readonly prompt: number;
  readonly numTokens: number;
}

export interface SimEngineOptions {
  readonly network: MemoryNetwork;
  readonly hostName: string;
  readonly engineId: string;
  readonly tpSize: number;
  readonly blockSize: number;
  readonly numBlocks: number;
  /** Pull by default. */
  readonly connector?: ConnectorModule;
  readonly numKvHeads?: number;
  readonly skewMs?: number;
  readonly stepMs?: number;
  readonly log?: Log;
  readonly metrics?: Metrics;
  readonly extra?: Readonly<Record<string, unknown>>;
  readonly env?: Readonly<Record<string, string>>;
  /** Part of the compatibility hash. */
  readonly model?: string;
  readonly attentionBackend?: string;
  /** In the hash in place of the engine's own. */
  readonly hashedAttentionBackend?: string;
  /** Where the cache is: "DRAM" by default. */
  readonly memoryType?: MemoryType;
  readonly loadFailurePolicy?: "fail" | "recompute";
  /** In place of the memory network's; listens on a free port of 127.0.0.1. */
  readonly sideChannel?: SideChannel;
  /** Speaks as a vLLM peer does: nothing of ours in its handshakes and parameters, no lease questions answered. */
  readonly plain?: boolean;
  readonly sabotage?: Sabotage;
  /** Computes a prompt's first layer in the step before the last, and says so to its workers. */
  readonly reportsLayers?: boolean;
  /** A rule that is broken from outside, by a connector's own tests. */
  readonly wrapTransport?: (transport: Transport) => Transport;
  /** An accelerator around the connector, whose memory the model computes in; steps wait then until what they computed is saved. */
  readonly device?: (around: SimDeviceAround) => SimDevice | undefined;
  /** Told of what no engine should ever see. */
  violation(what: string): void;
}

export interface SimDeviceAround {
  readonly hostName: string;
  readonly connector: ConnectorModule;
  readonly transport: Transport;
  readonly clock: Ambient["clock"];
  readonly config: KvCacheConfig;
  readonly tpSize: number;
  readonly numBlocks: number;
}

export interface SimDevice {
  readonly connector: ConnectorModule;
  readonly ranks: SimRanks;
}

/** Compute is over so many steps after the one that admits a prompt. */
const PREFILL_STEPS = 2;

interface Running extends ConnectorRequest {
  readonly prompt: number;
  readonly numTokens: number;
  readonly kind: "prefill" | "decode";
  readonly cachedTokens: number;
  blockIds: number[];
  phase: "queued" | "computing" | "receiving" | "over";
  stepsLeft: number;
  computedTokens: number;
  /** Its KV did not arrive: it is computed here. */
  recompute: boolean;
  resolve(params: KvTransferParams): void;
  reject(error: KvError): void;
}

export function simConfig(blockSize: number, numKvHeads = 4): KvCacheConfig {
  return {
    groups: [{ kind: "full", layerNames: ["layers.0", "layers.1"] }],
    blockSize,
    physicalBlocksPerLogical: 1,
    numKvHeads,
    headSize: 2,
    numHiddenLayers: 2,
    dtype: "torch.float32",
    cacheDtype: "auto",
    layout: "LBHNC",
    attentionBackend: "SIM",
  };
}

export async function createSimEngine(options: SimEngineOptions): Promise<SimEngine> {
  const { network, hostName, engineId, tpSize, stepMs = 2, violation } = options;
  const host = network.host(hostName, options.skewMs === undefined ? {} : { skewMs: options.skewMs });
  const { clock } = host;
  const ambient: Partial<Ambient> = {
    clock,
    random: host.random,
    metrics: options.metrics ?? noMetrics,
    ...(options.log === undefined ? {} : { log: options.log }),
  };
  const { memoryType = "DRAM" } = options;
  const cache = {
    ...simConfig(options.blockSize, options.numKvHeads),
    ...(options.attentionBackend === undefined ? {} : { attentionBackend: options.attentionBackend }),
  };
  const wrapTransport = options.wrapTransport ?? ((given: Transport) => given);
  const transport = wrapTransport(
    sabotagedTransport(memoryTransport({ network, host, memoryTypes: [memoryType] }), options.sabotage),
  );
  const ownSideChannel = options.sideChannel ?? memorySideChannel({ network, host });
  const sideChannel = sabotagedSideChannel(
    options.plain === true ? plainSideChannel(ownSideChannel) : ownSideChannel,
    options.sabotage,
  );
  const config = {
    ...readTransferConfig({
      kv_connector: "NixlConnector",
      kv_role: "kv_both",
      kv_buffer_device: memoryType === "DRAM" ? "cpu" : "cuda",
      kv_load_failure_policy: options.loadFailurePolicy ?? "fail",
      kv_connector_extra_config: options.extra ?? {},
    }),
    ...(options.sideChannel === undefined
      ? { sideChannelHost: hostName }
      : { sideChannelHost: "127.0.0.1", sideChannelPort: 0 }),
    env: options.env ?? {},
  };
  const engine = {
    engineId,
    tpSize,
    ppSize: 1,
    dpRank: 0,
    model: {
      model: options.model ?? "sim",
      vllmVersion: "0.33.0",
      connectorVersion: 15,
      isHmaEnabled: false,
      speculativeConfig: null,
      ...(options.hashedAttentionBackend === undefined
        ? {}
        : { hashedAttentionBackend: options.hashedAttentionBackend }),
    },
  };
  const { numBlocks } = options;
  const connector = options.connector ?? pullConnector;
  const device = options.device?.({
    ...{ hostName, connector, transport, clock, config: cache, tpSize, numBlocks },
  });
  const ranks = device?.ranks ?? createSimRanks({ transport, config: cache, tpSize, numBlocks });
  const { createScheduler, createWorker } = device?.connector ?? connector;
  const scheduler = await createScheduler({ ...ambient, config, engine, cache, sideChannel });
  const workers = await Promise.all(
    Array.from({ length: tpSize }, (_, tpRank) =>
      createWorker({
        ...ambient,
        config,
        engine,
        tpRank,
        ppRank: 0,
        transport,
        platform: memoryType === "DRAM" ? cpuPlatform() : cudaPlatform({ gpus: () => ["nvidia0"] }),
        sideChannel,
      }),
    ),
  );
  for (const [tpRank, worker] of workers.entries()) {
    const caches = ranks.caches[tpRank];
    if (caches !== undefined) await worker.registerKvCaches(caches);
    worker.onProgress(wake);
  }
  await scheduler.setHandshakeMetadata(
    await Promise.all(workers.map((worker) => worker.handshakeMetadata())),
  );

  const aggregate = createWorkerOutputAggregator({ workers: tpSize });
  const pool = createBlockPool(options.numBlocks, {
    allocated(blockId) {
      if (!ranks.poisoned(blockId))
        violation(`${hostName}: block ${blockId} was written to while nobody had it`);
    },
    freed: (blockId) => ranks.poison(blockId),
  });
  const requests = new Map<string, Running>();
  /** Blocks of requests that are over for the engine and not for the connector. */
  const kept = new Map<string, number[]>();
  const queue: Running[] = [];
  let stepping = false;
  let alive = true;
  host.onKill(() => {
    alive = false;
    for (const request of requests.values()) {
      request.reject(new KvError("KV_ENGINE_FAILED", `engine ${engineId} on ${hostName} was killed`));
    }
    requests.clear();
  });

  function wake(): void {
    if (stepping || !alive) return;
    stepping = true;
    clock.setTimer(() => void step(), stepMs);
  }

  function hasWork(): boolean {
    for (const { phase } of requests.values()) if (phase !== "receiving") return true;
    return scheduler.hasPendingWork();
  }

  async function step(): Promise<void> {
    // Where the step waits, the next one is not begun before it is over.
    stepping = device !== undefined;
    for (const request of queue.splice(0))
      if (request.phase === "queued" && !admit(request)) queue.push(request);
    const metadata = overTheWire(scheduler.buildStepMetadata());
    for (const worker of workers) worker.startLoad(metadata);
    const ended = [...requests.values()].filter(compute);
    const computed: Record<string, number> = {};
    for (const { requestId, kind, computedTokens } of requests.values())
      if (kind === "prefill") computed[requestId] = computedTokens;
    const saves = workers.map((worker) => worker.waitForSave(metadata, computed));
    if (device === undefined) for (const save of saves) save.catch((error) => violation(String(error)));
    else {
      failUnsaved(await Promise.allSettled(saves));
      stepping = false;
      if (!alive) return;
    }
    for (const request of ended) if (request.phase !== "over") end(request, "length");
    for (const [tpRank, worker] of workers.entries()) {
      apply(aggregate.add(tpRank, overTheWire(worker.collectFinished())));
    }
    if (hasWork()) wake();
  }

  /** A request whose blocks could not be saved ends before anybody hears that they are there. */
  function failUnsaved(outcomes: readonly PromiseSettledResult<void>[]): void {
    for (const outcome of outcomes) {
      if (outcome.status === "fulfilled") continue;
      const error: unknown = outcome.reason;
      const failed = KvError.is(error, "KV_STAGING_FAILED") ? error.details?.["requestIds"] : undefined;
      if (!KvError.is(error) || !Array.isArray(failed)) {
        violation(`${hostName}: waitForSave failed with ${String(error)}`);
        continue;
      }
      for (const requestId of failed) {
        const request = requests.get(String(requestId));
        if (request === undefined) continue;
        end(request, "error");
        request.reject(error);
      }
    }
  }

  /** False when there are no blocks for it now. */
  function admit(request: Running): boolean {
    let external = 0;
    try {
      const matched = scheduler.matchedTokens(request, request.cachedTokens);
      if (matched.wait === true) return false;
      external = matched.tokens;
    } catch (error) {
      end(request, "error");
      request.reject(KvError.from(error, "KV_INTERNAL", "matchedTokens"));
      return true;
    }
    const blockIds = pool.allocate(Math.ceil(request.numTokens / options.blockSize));
    if (blockIds === undefined) return false;
    request.blockIds = blockIds;
    // What no peer sends is computed here: at a full prefix hit no more than the last token.
    ranks.compute(request.prompt, blockIds, 0, external === 0 ? request.numTokens : request.cachedTokens);
    scheduler.afterAllocation(request, [blockIds], external);
    request.phase = external > 0 ? "receiving" : "computing";
    request.stepsLeft = PREFILL_STEPS;
    if (external > 0 && request.cachedTokens + external !== request.numTokens) {
      violation(`${hostName}: ${external} tokens after ${request.cachedTokens} of ${request.numTokens}`);
    }
    return true;
  }

  /** Whether it is over with this step. A prompt is computed in two chunks where chunks are saved. */
  function compute(request: Running): boolean {
    if (request.phase !== "computing") return false;
    const { prompt, numTokens } = request;
    if (request.recompute && request.stepsLeft === PREFILL_STEPS) {
      ranks.compute(prompt, request.blockIds, 0, numTokens);
    }
    request.stepsLeft -= 1;
    if (request.kind === "prefill" && (request.stepsLeft === 0 || device !== undefined)) {
      request.computedTokens = request.stepsLeft === 0 ? numTokens : Math.floor(numTokens / 2);
      ranks.compute(prompt, request.blockIds, 0, request.computedTokens);
    }
    if (request.stepsLeft > 0) {
      if (options.reportsLayers === true && request.kind === "prefill") computeFirstLayer(request);
      return false;
    }
    if (request.kind === "decode") check(request, false);
    return true;
  }

  function computeFirstLayer({ requestId, prompt, blockIds, numTokens }: Running): void {
    ranks.compute(prompt, blockIds, 0, numTokens, 1);
    const layer = { regions: ["layers.0"], computedTokens: { [requestId]: numTokens } };
    for (const worker of workers) worker.layerComputed?.(layer);
  }

  function check(request: Running, received: boolean): void {
    const wrong = ranks.firstWrong(request.prompt, request.blockIds, request.numTokens, received);
    if (wrong !== undefined) violation(`${hostName}: request ${request.requestId} has wrong bytes: ${wrong}`);
  }

  function end(request: Running, reason: "length" | "aborted" | "error"): void {
    request.phase = "over";
    requests.delete(request.requestId);
    const { requestId, blockIds } = request;
    const finished = scheduler.requestFinished(request, [blockIds], reason);
    if (finished.keepBlocks) kept.set(requestId, blockIds);
    else pool.free(blockIds);
    const { kv_peer, ...params } = finished.kvTransferParams ?? {};
    if (reason === "length") {
      request.resolve(overTheWire(options.plain === true ? params : { ...params, kv_peer }));
    }
  }

  function apply(output: WorkerOutput): void {
    const failed = new Map(output.failedReceiving.map((failure) => [failure.requestId, failure]));
    for (const blockId of output.failedBlockIds) {
      if (!pool.isUsed(blockId)) violation(`${hostName}: failed block ${blockId} belongs to nobody`);
    }
    // The blocks go back in the turn in which the scheduler connector hears of it: it answers for them until then.
    scheduler.applyWorkerOutput(output);
    for (const requestId of [...output.finishedSending, ...output.finishedReceiving]) {
      const blockIds = kept.get(requestId);
      if (blockIds === undefined) continue;
      kept.delete(requestId);
      pool.free(blockIds);
    }
    for (const requestId of output.finishedReceiving) {
      const request = requests.get(requestId);
      if (request?.phase !== "receiving") continue;
      const failure = failed.get(requestId);
      if (failure === undefined) {
        check(request, true);
        // A step of decoding, in which nobody may write to the blocks.
        request.phase = "computing";
        request.stepsLeft = PREFILL_STEPS;
      } else if (scheduler.loadFailurePolicy === "recompute" && failure.blocksAtRisk !== true) {
        request.recompute = true;
        request.phase = "computing";
        request.stepsLeft = PREFILL_STEPS;
      } else {
        end(request, "error");
        request.reject(new KvError(failure.code, failure.message));
      }
    }
  }

  function submit(
    request: SimRequest,
    kind: Running["kind"],
    params: KvTransferParams,
    cachedTokens: number,
  ): Promise<KvTransferParams> {
    return new Promise((resolve, reject) => {
      if (!alive) {
        reject(new KvError("KV_ENGINE_FAILED", `engine ${engineId} on ${hostName} is dead`));
        return;
      }
      const running: Running = {
        ...request,
        kind,
        numPromptTokens: request.numTokens,
        kvTransferParams: params,
        cachedTokens,
        blockIds: [],
        phase: "queued",
        stepsLeft: 0,
        computedTokens: 0,
        recompute: false,
        resolve,
        reject,
      };
      requests.set(request.requestId, running);
      queue.push(running);
      scheduler.requestQueued?.(running);
      wake();
    });
  }

  return {
    engineId,
    host,
    tpSize,
    get alive() {
      return alive;
    },
    prefill: (request) =>
      submit(
        request,
        "prefill",
        {
          do_remote_decode: true,
          do_remote_prefill: false,
          remote_engine_id: null,
          remote_block_ids: null,
          remote_host: null,
          remote_port: null,
        },
        0,
      ),
    async decode({ params, cachedTokens = 0, ...request }) {
      await submit(request, "decode", params, cachedTokens);
    },
    abort(requestId) {
      const request = requests.get(requestId);
      if (request === undefined) return;
      const index = queue.indexOf(request);
      if (index >= 0) queue.splice(index, 1);
      end(request, "aborted");
      request.reject(new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted by its client`));
      wake();
    },
    outstanding() {
      const held: Record<string, number> = { blocks: pool.used, kept: kept.size, requests: requests.size };
      held.aggregating = aggregate.size;
      const { listeners: _, ...rest } = scheduler.outstanding();
      for (const [name, count] of Object.entries(rest)) held[`scheduler.${name}`] = count;
      for (const [tpRank, worker] of workers.entries()) {
        for (const [name, count] of Object.entries(worker.outstanding()))
          held[`rank${tpRank}.${name}`] = count;
      }
      return held;
    },
    kill: () => host.kill(),
    async close() {
      alive = false;
      await Promise.all(workers.map((worker) => worker.close()));
      await scheduler.close();
      await transport.close();
      ranks.close();
      await sideChannel.close();
    },
  };
}

/** The sides of a connector may live in different processes: what passes between them goes through JSON. */
function overTheWire<T>(value: T): T {
  return JSON.parse(JSON.stringify(value)) as T;
}
