import { delegateTo } from "@kv/connector/building-blocks";
import type {
  Clock,
  ConnectorModule,
  ConnectorRequest,
  SchedulerConnector,
  SideChannel,
  Tracer,
  WorkerConnector,
  WorkerOptions,
} from "@kv/interface";
import { codeOf, TracedAgents } from "./traced-agents.js";
import { blockRanges, describeAnswer, describeRequest } from "./wire-text.js";

interface Line {
  readonly cells: readonly string[];
  /** By each living engine, after the event. */
  readonly held: ReadonlyMap<string, string>;
}

type Held = Map<string, readonly number[]>;

const TRACEPARENT = "00-00000000000000000000000000000001-0000000000000001-01";

/** What passes between each engine and its connector. */
export class Trace {
  readonly #agents = new TracedAgents();
  readonly #lines: Line[] = [];
  readonly #engines = new Map<string, Held>();
  readonly #starts = new Map<string, number>();
  #clock: Clock | undefined;

  observed(connector: ConnectorModule): ConnectorModule {
    return {
      name: connector.name,
      createScheduler: async (options) => {
        const engine = options.engine.engineId.toUpperCase();
        this.#clock ??= options.clock;
        const held: Held = new Map();
        this.#engines.set(engine, held);
        this.#starts.set(engine, (this.#starts.get(engine) ?? 0) + 1);
        return this.#scheduler(engine, held, await connector.createScheduler(options));
      },
      createWorker: (options) => this.#worker(connector, options),
    };
  }

  killed(engineId: string): void {
    const engine = engineId.toUpperCase();
    this.#engines.delete(engine);
    this.#say(engine, "is killed");
  }

  heldBy(engineId: string): number {
    return [...(this.#engines.get(engineId.toUpperCase())?.values() ?? [])].flat().length;
  }

  text(): string {
    const engines = [...new Set(this.#lines.flatMap(({ held }) => [...held.keys()]))];
    const rows = [
      ["ms", ...engines.map((engine) => `${engine} holds`), "who", "what"],
      ...this.#lines.map(({ cells: [ms = "", ...rest], held }) => [
        ms,
        ...engines.map((engine) => held.get(engine) ?? "gone"),
        ...rest,
      ]),
    ];
    const width = (column: number) => Math.max(...rows.map((row) => row[column]?.length ?? 0));
    const padded = (cell: string, column: number) =>
      column === 0 ? cell.padStart(width(column)) : cell.padEnd(width(column));
    return rows.map((row) => row.map(padded).join("  ").trimEnd()).join("\n");
  }

  #say(who: string, what: string): void {
    const held = [...this.#engines].map(([engine, each]) => [
      engine,
      blockRanges([...each.values()].flat()),
    ]);
    this.#lines.push({
      cells: [String(this.#now()), who, what],
      held: new Map(held as [string, string][]),
    });
  }

  #now(): number {
    return this.#clock?.now() ?? 0;
  }

  #scheduler(engine: string, held: Held, scheduler: SchedulerConnector): SchedulerConnector {
    const hits = new Map<string, number>();
    const prefills = new Set<string>();
    const kept = new Set<string>();
    const say = (requestId: string, what: string) => this.#say(engine, `${requestId} ${what}`);
    const free = (requestId: string, why: string) => {
      const blockIds = held.get(requestId);
      held.delete(requestId);
      kept.delete(requestId);
      say(requestId, blockIds === undefined ? why : `${why}, frees ${blockRanges(blockIds)}`);
    };
    return delegateTo(scheduler, {
      requestQueued: (request) => {
        this.#say(
          engine,
          `gets ${request.requestId}, ${request.numPromptTokens} tokens: ${legText(request)}`,
        );
        scheduler.requestQueued?.(request);
      },
      matchedTokens: (request, numComputedTokens) => {
        hits.set(request.requestId, numComputedTokens);
        if (isPrefill(request)) prefills.add(request.requestId);
        try {
          return scheduler.matchedTokens(request, numComputedTokens);
        } catch (error) {
          say(request.requestId, `is refused: ${codeOf(error)}`);
          throw error;
        }
      },
      afterAllocation: (request, blockIds, externalTokens) => {
        const { requestId, numPromptTokens } = request;
        held.set(requestId, blockIds.flat());
        const work =
          isPrefill(request) && externalTokens === 0
            ? `computes ${numPromptTokens} tokens`
            : `${hits.get(requestId)} tokens cached, ${externalTokens} to receive`;
        say(requestId, `takes ${blockRanges(blockIds.flat())}: ${work}`);
        scheduler.afterAllocation(request, blockIds, externalTokens);
      },
      requestFinished: (request, blockIds, reason) => {
        const { requestId } = request;
        const finished = scheduler.requestFinished(request, blockIds, reason);
        const how = reason === "length" ? "is done" : `ends: ${reason}`;
        if (finished.keepBlocks) {
          kept.add(requestId);
          held.set(requestId, blockIds.flat());
          say(requestId, `${how}, keeps ${blockRanges(blockIds.flat())}`);
        } else free(requestId, how);
        return finished;
      },
      applyWorkerOutput: (output) => {
        scheduler.applyWorkerOutput(output);
        for (const requestId of output.finishedSending) free(requestId, "finished sending");
        for (const requestId of output.finishedReceiving) {
          const failure = output.failedReceiving.find((each) => each.requestId === requestId);
          const risk = failure?.blocksAtRisk === true ? ", P may still write to its blocks" : "";
          if (failure !== undefined)
            say(requestId, `fails: ${failure.code} (${failure.failureType})${risk}`);
          else if (kept.has(requestId)) free(requestId, "finished receiving");
          else
            say(
              requestId,
              `finished receiving, ${prefills.has(requestId) ? "computes the rest" : "decodes"}`,
            );
        }
      },
    });
  }

  async #worker(connector: ConnectorModule, options: WorkerOptions): Promise<WorkerConnector> {
    const { engine, tpRank, transport } = options;
    const engineName = engine.engineId.toUpperCase();
    const rank = engine.tpSize === 1 ? engineName : `${engineName}.${tpRank}`;
    const worker = await connector.createWorker({
      ...options,
      tracer: this.#leaseTracer(rank),
      sideChannel: this.#sideChannel(rank, options.sideChannel),
      transport: {
        ...transport,
        createAgent: async (agentOptions) =>
          this.#agents.observed(await transport.createAgent(agentOptions), rank, (way, what) =>
            this.#say(`${rank} ${way}`, what),
          ),
      },
    });
    return delegateTo(worker, {
      registerKvCaches: (caches) => {
        this.#agents.register(engineName, caches.regions);
        return worker.registerKvCaches(caches);
      },
      layerComputed: (layer) => {
        for (const requestId of Object.keys(layer.computedTokens))
          this.#say(rank, `${requestId} has computed ${layer.regions.join()}`);
        worker.layerComputed?.(layer);
      },
    });
  }

  /** Spans say when a lease begins, is extended and ends. */
  #leaseTracer(rank: string): Tracer {
    return {
      start: (name, { attributes } = {}) => {
        if (name !== "kv.lease") return undefined;
        const say = (what: string) =>
          this.#say(rank, `lease of ${String(attributes?.["kv.wire_id"])} ${what}`);
        let untilMs = this.#now() + Number(attributes?.["kv.lease.granted_ms"]);
        say(`until ${untilMs}`);
        return {
          traceparent: TRACEPARENT,
          set() {},
          event: (_, extension) => {
            const extendedMs = this.#now() + Number(extension?.["kv.lease.extension_ms"]);
            if (extendedMs > untilMs) say(`until ${extendedMs}`);
            untilMs = Math.max(untilMs, extendedMs);
          },
          end: (error) => say(error === undefined ? "ends" : "expires"),
        };
      },
    };
  }

  #sideChannel(rank: string, sideChannel: SideChannel): SideChannel {
    return {
      ...sideChannel,
      request: async (options) => {
        const peer = options.host.toUpperCase();
        this.#say(`${rank} -> ${peer}`, describeRequest(options.frames));
        try {
          const reply = await sideChannel.request(options);
          const answer = describeAnswer(reply.frames);
          this.#say(`${rank} <- ${peer}`, `${answer}, process ${this.#starts.get(peer)}`);
          return reply;
        } catch (error) {
          this.#say(`${rank} <- ${peer}`, `no answer: ${codeOf(error)}`);
          throw error;
        }
      },
    };
  }
}

const isPrefill = ({ kvTransferParams }: ConnectorRequest) =>
  kvTransferParams?.["do_remote_decode"] === true;

function legText(request: ConnectorRequest): string {
  const { remote_engine_id, remote_request_id, remote_block_ids } = request.kvTransferParams ?? {};
  const blocks = Array.isArray(remote_block_ids)
    ? `, blocks ${blockRanges(remote_block_ids.flat())}`
    : "";
  const peer = `${String(remote_engine_id).toUpperCase()} ${String(remote_request_id)}${blocks}`;
  if (isPrefill(request))
    return blocks === "" ? "do_remote_decode" : `do_remote_decode, read back from ${peer}`;
  return `do_remote_prefill by ${peer}`;
}
