import {
  cpuPlatform,
  createWorkerOutputAggregator,
  readTransferConfig,
  staged,
} from "@kv/connector";
import type {
  BlockIds,
  ConnectorModule,
  ConnectorRequest,
  KvCacheConfig,
  KvTransferParams,
  StepMetadata,
  WorkerOutput,
} from "@kv/interface";
import {
  type MemoryNetwork,
  memorySideChannel,
  memoryTransport,
  type SeededRandom,
} from "@kv/transport-memory";
import { engineIdentity } from "../engine-identity.js";
import { createBlockPool } from "../simulator/block-pool.js";
import { createGroupMemory } from "../simulator/sim-ranks.js";
import { registerCaches } from "../simulator/sim-sides.js";
import { overTheWire } from "../simulator/sim-steps.js";
import { copyPlatform } from "./copy-platform.js";

export interface GroupEngineOptions {
  readonly network: MemoryNetwork;
  readonly hostName: string;
  readonly tpSize: number;
  readonly config: KvCacheConfig;
  /** Blocks of each layer. */
  readonly numBlocks: number;
  readonly connector: ConnectorModule;
  /** Host staging with so many pool blocks. Default: none. */
  readonly poolBlocks?: number | undefined;
  /** `kv_connector_extra_config`. Default: none. */
  readonly extra?: Readonly<Record<string, unknown>> | undefined;
  readonly random: SeededRandom;
  /** Called when something happens that must never happen. */
  violation(what: string): void;
}

export interface GroupRequest {
  readonly requestId: string;
  /** Number that identifies the prompt. */
  readonly prompt: number;
  readonly numTokens: number;
  /** Tokens of a local prefix hit. */
  readonly cachedTokens: number;
  /** Of these, the tokens that each group has. Default: all. */
  readonly cachedByGroup?: readonly number[] | undefined;
  /** Tokens that D generates. Default: one, whose KV nobody computes. */
  readonly outputTokens?: number | undefined;
}

interface Running extends GroupRequest, ConnectorRequest {
  readonly isProduced: boolean;
  phase: "queued" | "receiving" | "running" | "over";
  blockIds: BlockIds;
  computedTokens: number;
  /** Tokens that were there or come from a peer. */
  coveredTokens: number;
  resolve(params: KvTransferParams): void;
}

/**
 * An engine without a model whose KV cache groups have blocks of their own sizes: it computes
 * prompts in random chunks, leaves requests out of steps, and preempts them. It names only the
 * requests of a step to its workers, as vLLM's scheduler does.
 */
export interface GroupEngine {
  readonly engineId: string;
  readonly tpSize: number;
  /** Where its side channel listens. */
  readonly address: { readonly host: string; readonly port: number };
  /**
   * Computes a prompt, and resolves to the parameters for its reader. `params` of a D: reads the
   * last turn back before, and compares it.
   */
  prefill(
    request: GroupRequest & { readonly params?: KvTransferParams },
  ): Promise<KvTransferParams>;
  /**
   * Receives a prompt's KV, compares it with the prompt's, generates the output, and resolves to
   * the parameters for the P of the next turn.
   */
  decode(request: GroupRequest & { readonly params: KvTransferParams }): Promise<KvTransferParams>;
  /** Runs one step. */
  step(): Promise<void>;
  /** Counts of everything that the engine holds, all zero when all requests are over. */
  outstanding(): Readonly<Record<string, number>>;
  close(): Promise<void>;
}

const MAX_CHUNK_TOKENS = 90;

/** Ids of the tokens of a conversation from the `from`-th on. */
const tokenIds = (prompt: number, from: number, length: number) =>
  Array.from({ length }, (_, at) => prompt * 1000 + from + at);

/** Tokens whose KV the request holds in the end: not that of D's last token. */
const held = ({ isProduced, numTokens, outputTokens = 1 }: Running) =>
  isProduced ? numTokens : numTokens + outputTokens - 1;

export async function createGroupEngine(options: GroupEngineOptions): Promise<GroupEngine> {
  const { network, hostName, tpSize, config, numBlocks, connector, poolBlocks, random, violation } =
    options;
  const host = network.host(hostName);
  const { clock } = host;
  const transport = memoryTransport({ network, host });
  const sideChannel = memorySideChannel({ network, host });
  const memory = createGroupMemory({ transport, config, tpSize, numBlocks });
  const platform = copyPlatform({ clock, next: () => random.next(), maxMs: 4 });
  const module = poolBlocks === undefined ? connector : staged(connector, { platform, poolBlocks });
  const shared = {
    clock,
    random: host.random,
    cache: config,
    transport,
    platform: cpuPlatform(),
    sideChannel,
    config: {
      ...readTransferConfig({
        kv_connector: "NixlConnector",
        kv_role: "kv_both",
        kv_buffer_device: "cpu",
        kv_connector_extra_config: options.extra ?? {},
      }),
      sideChannelHost: hostName,
    },
    engine: engineIdentity(hostName, { tpSize }),
  };
  const scheduler = await module.createScheduler(shared);
  const workers = await Promise.all(
    memory.caches.map((_, tpRank) => module.createWorker({ ...shared, tpRank, ppRank: 0 })),
  );
  await registerCaches({ scheduler, workers, ranks: memory });
  const aggregate = createWorkerOutputAggregator({ workers: workers.length });
  const groups = config.groups.map(
    ({ kind, blockSize = config.blockSize, slidingWindowTokens, enableKvTransfer }, group) => ({
      isState: kind === "mamba",
      group,
      blockTokens: blockSize,
      slidingWindowTokens,
      isTransferred: enableKvTransfer !== false,
      pool: createBlockPool(numBlocks, {
        allocated(blockId) {
          if (!memory.poisoned(group, blockId))
            violation(
              `${hostName}: block ${blockId} of group ${group} was written to while nobody had it`,
            );
        },
        freed: (blockId) => memory.poison(group, blockId),
      }),
    }),
  );
  /** Tokens at the end of a prompt that a D computes itself. */
  const ownTokens = groups.some(({ isState }) => isState) ? 1 : 0;
  const requests = new Map<string, Running>();
  /** Blocks that the connector still needs after their requests ended. */
  const kept = new Map<string, BlockIds>();

  function allocate(numTokens: number): BlockIds | undefined {
    const taken: number[][] = [];
    for (const { pool, blockTokens, isState } of groups) {
      const ids = pool.allocate(isState ? 1 : Math.ceil(numTokens / blockTokens));
      if (ids === undefined) {
        free(taken);
        return undefined;
      }
      taken.push(ids);
    }
    return taken;
  }

  function free(blockIds: BlockIds): void {
    for (const [group, ids] of blockIds.entries()) groups[group]?.pool.free(ids);
  }

  function compute({ prompt, blockIds }: Running, from: number, until: number): void {
    for (const { group } of groups)
      memory.compute({ prompt, group, blockIds: blockIds[group] ?? [], from, until });
  }

  /** Compares the first `numTokens` tokens, which a peer has sent. */
  function check(request: Running, numTokens: number): void {
    const { requestId, prompt, cachedTokens, blockIds } = request;
    for (const { group, blockTokens, slidingWindowTokens = numTokens, isTransferred } of groups) {
      if (!isTransferred) {
        const untouched = (blockIds[group] ?? []).slice(Math.ceil(cachedTokens / blockTokens));
        if (!untouched.every((id) => memory.poisoned(group, id)))
          violation(
            `${hostName}: a peer wrote to group ${group} of request ${requestId}, which takes no part`,
          );
        continue;
      }
      const from = Math.max(0, numTokens - slidingWindowTokens + 1);
      const at = { prompt, group, blockIds: blockIds[group] ?? [], from, until: numTokens };
      const wrong = memory.firstWrong(at);
      if (wrong !== undefined)
        violation(`${hostName}: request ${requestId} has wrong bytes: ${wrong}`);
    }
  }

  /** Leaves the request in the queue while the connector or the pools have no room. */
  function admit(request: Running): void {
    const { cachedTokens, cachedByGroup } = request;
    const matched = scheduler.matchedTokens(request, cachedTokens, cachedByGroup);
    if (matched.wait === true) return;
    const blockIds = allocate(held(request));
    if (blockIds === undefined) return;
    request.blockIds = blockIds;
    request.phase = matched.tokens > 0 ? "receiving" : "running";
    request.computedTokens = cachedTokens;
    for (const { group } of groups) {
      const until = cachedByGroup?.[group] ?? cachedTokens;
      memory.compute({
        prompt: request.prompt,
        group,
        blockIds: blockIds[group] ?? [],
        from: 0,
        until,
      });
    }
    scheduler.afterAllocation(request, blockIds, matched.tokens, cachedByGroup);
    const { remote_num_tokens: has } = request.kvTransferParams ?? {};
    const wanted = request.isProduced ? has : request.numTokens - ownTokens;
    if (matched.tokens > 0 || !request.isProduced)
      request.coveredTokens = cachedTokens + matched.tokens;
    if (request.coveredTokens !== (request.phase === "receiving" ? wanted : request.coveredTokens))
      violation(
        `${hostName}: ${matched.tokens} tokens after ${cachedTokens} of ${request.numTokens}`,
      );
  }

  /**
   * Computes a chunk of a prompt, or leaves the request out of the step. Returns whether the step
   * names it.
   */
  function advance(request: Running): boolean {
    const chance = random.next();
    if (chance < 0.3) return false;
    if (chance < 0.35) {
      free(request.blockIds);
      request.blockIds = [];
      request.phase = "queued";
      return false;
    }
    const { computedTokens, numTokens } = request;
    request.computedTokens = Math.min(
      numTokens,
      computedTokens + 1 + random.integer(MAX_CHUNK_TOKENS),
    );
    compute(request, computedTokens, request.computedTokens);
    return true;
  }

  function end(request: Running): void {
    request.phase = "over";
    requests.delete(request.requestId);
    const { prompt, numTokens, outputTokens = 1 } = request;
    const outputTokenIds = tokenIds(prompt, numTokens, outputTokens);
    const { keepBlocks, kvTransferParams = {} } = scheduler.requestFinished(
      { ...request, outputTokenIds, numComputedTokens: held(request) },
      request.blockIds,
      "length",
    );
    if (keepBlocks) kept.set(request.requestId, request.blockIds);
    else free(request.blockIds);
    request.resolve(overTheWire(kvTransferParams));
  }

  function apply(output: WorkerOutput): void {
    scheduler.applyWorkerOutput(output);
    for (const { requestId, message } of output.failedReceiving)
      violation(`${hostName}: request ${requestId} failed: ${message}`);
    for (const requestId of [...output.finishedSending, ...output.finishedReceiving]) {
      free(kept.get(requestId) ?? []);
      kept.delete(requestId);
      const request = requests.get(requestId);
      if (request?.phase !== "receiving") continue;
      if (!output.failedReceiving.some((failure) => failure.requestId === requestId))
        check(request, request.coveredTokens);
      request.phase = "running";
      request.computedTokens = request.coveredTokens;
      if (request.isProduced) continue;
      compute(request, request.coveredTokens, held(request));
      end(request);
    }
  }

  function submit(
    request: GroupRequest,
    isProduced: boolean,
    params: KvTransferParams,
  ): Promise<KvTransferParams> {
    const { requestId, prompt } = request;
    const whole = { requestId, numPromptTokens: request.numTokens, kvTransferParams: params };
    const numTokens = scheduler.tokensToPrefill?.(whole) ?? request.numTokens;
    return new Promise((resolve) => {
      const running: Running = {
        ...request,
        ...whole,
        numTokens,
        numPromptTokens: numTokens,
        promptTokenIds: tokenIds(prompt, 0, numTokens),
        isProduced,
        phase: "queued",
        blockIds: [],
        computedTokens: 0,
        coveredTokens: 0,
        resolve,
      };
      requests.set(request.requestId, running);
      scheduler.requestQueued?.(running);
    });
  }

  return {
    engineId: hostName,
    tpSize,
    address: { host: hostName, port: shared.config.sideChannelPort },
    prefill: ({ params, ...request }) =>
      submit(request, true, { do_remote_decode: true, do_remote_prefill: false, ...params }),
    decode: ({ params, ...request }) => submit(request, false, params),
    async step() {
      for (const request of requests.values()) if (request.phase === "queued") admit(request);
      const metadata = overTheWire<StepMetadata>(scheduler.buildStepMetadata());
      for (const worker of workers) worker.startLoad(metadata);
      const running = [...requests.values()].filter(
        ({ isProduced, phase }) => isProduced && phase === "running",
      );
      const named = running.filter(advance);
      const computed = Object.fromEntries(
        named.map(({ requestId, computedTokens }) => [requestId, computedTokens]),
      );
      await Promise.all(workers.map((worker) => worker.waitForSave(metadata, computed)));
      for (const request of named) if (request.computedTokens === request.numTokens) end(request);
      for (const [tpRank, worker] of workers.entries())
        apply(aggregate.add({ tpRank }, overTheWire(worker.collectFinished())));
    },
    outstanding() {
      const { listeners: _, ...held } = scheduler.outstanding();
      const blocks = groups.reduce((sum, { pool }) => sum + pool.used, 0);
      const counts: Record<string, number> = {
        ...held,
        blocks,
        kept: kept.size,
        requests: requests.size,
      };
      for (const [rank, worker] of workers.entries())
        for (const [name, count] of Object.entries(worker.outstanding()))
          counts[`rank${rank}.${name}`] = count;
      return counts;
    },
    async close() {
      await Promise.all(workers.map((worker) => worker.close()));
      await scheduler.close();
      await transport.close();
      await sideChannel.close();
    },
  };
}
