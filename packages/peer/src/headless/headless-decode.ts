import type {
  BlockIds,
  ConnectorModule,
  ConnectorRequest,
  FailedReceive,
  WorkerOutput,
} from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { HeadlessEngine, type HeadlessEngineOptions } from "./headless-engine.js";

/** The value of every cache byte of a headless decode engine before something is written to it. */
export const UNWRITTEN_BYTE = 0xa5;

/** Options of `openHeadlessDecode`. */
export interface HeadlessDecodeOptions extends HeadlessEngineOptions {
  /** Receives the KV. `pushConnector` for a P that pushes. @default pullConnector */
  readonly connector?: ConnectorModule | undefined;
  /**
   * The compatibility hash that the engine announces in place of its own; a P that pushes compares
   * it with its own.
   */
  readonly announcedHash?: string | undefined;
}

/** How `HeadlessDecode.receive` ended. */
export interface ReceiveResult {
  /** Why the KV did not arrive; undefined when it did. */
  readonly failure: FailedReceive | undefined;
  /** True when `signal` aborted the request before it ended. */
  readonly aborted: boolean;
}

/** Resolves the pending `receive` of a request id. */
type Receiving = Map<string, (failure: FailedReceive | undefined) => void>;

/**
 * A decode engine without a model. It calls a connector in the order in which an engine does and
 * gives access to the bytes that arrive.
 */
export class HeadlessDecode {
  readonly #engine: HeadlessEngine;
  readonly #numGroups: number;
  readonly #receiving: Receiving;

  constructor(engine: HeadlessEngine, numGroups: number, receiving: Receiving) {
    this.#engine = engine;
    this.#numGroups = numGroups;
    this.#receiving = receiving;
  }

  get tpSize(): number {
    return this.#engine.tpSize;
  }

  /**
   * Receives the KV of a request into `blockIds`, one list of logical block ids per KV cache group.
   * `numComputedTokens` of the prompt are already in the first blocks (default 0). Resolves when
   * every rank has finished and nothing accesses the blocks any more. When no token is left to
   * receive, it only notifies P. `signal` aborts the request as an engine does.
   *
   * @throws `KV_REQUEST_INVALID` for parameters that the connector refuses.
   */
  async receive(
    request: ConnectorRequest,
    blockIds: BlockIds,
    {
      numComputedTokens = 0,
      signal,
    }: { numComputedTokens?: number; signal?: AbortSignal | undefined } = {},
  ): Promise<ReceiveResult> {
    const { scheduler } = this.#engine;
    const { requestId } = request;
    const { tokens } = scheduler.matchedTokens(request, numComputedTokens);
    if (tokens === 0) {
      scheduler.afterAllocation(request, blockIds, 0);
      this.#engine.step();
      return { failure: undefined, aborted: false };
    }
    const finished = new Promise<FailedReceive | undefined>((resolve) =>
      this.#receiving.set(requestId, resolve),
    );
    scheduler.afterAllocation(request, blockIds, tokens);
    this.#engine.step();
    let aborted = false;
    const abort = () => {
      if (!this.#receiving.has(requestId)) return;
      aborted = true;
      this.#abort(request, blockIds);
    };
    if (signal?.aborted === true) abort();
    else signal?.addEventListener("abort", abort, { once: true });
    const failure = await finished;
    signal?.removeEventListener("abort", abort);
    return { failure, aborted };
  }

  #abort(request: ConnectorRequest, blockIds: BlockIds): void {
    const { keepBlocks } = this.#engine.scheduler.requestFinished(request, blockIds, "aborted");
    this.#engine.step();
    // A transfer may still write to the blocks: the workers report when it has ended.
    if (keepBlocks) return;
    this.#receiving.get(request.requestId)?.(undefined);
    this.#receiving.delete(request.requestId);
  }

  /**
   * Reports a request that waits for blocks, so that the connector sends heartbeats for its lease.
   * `receive` continues from there.
   */
  queue(request: ConnectorRequest): void {
    this.#engine.scheduler.requestQueued?.(request);
    this.#engine.step();
  }

  /** Queues a request and aborts it before it gets blocks, so that the connector notifies P. */
  giveUpQueued(request: ConnectorRequest): void {
    const { scheduler } = this.#engine;
    scheduler.requestQueued?.(request);
    scheduler.requestFinished(
      request,
      Array.from({ length: this.#numGroups }, () => []),
      "aborted",
    );
    this.#engine.step();
  }

  /** Ends a request whose KV has arrived. */
  finish(request: ConnectorRequest, blockIds: BlockIds): void {
    this.#engine.scheduler.requestFinished(request, blockIds, "length");
    this.#engine.step();
  }

  /** A view of the bytes of one kernel block of a region on one rank. */
  block(tpRank: number, region: number, blockId: number): Uint8Array {
    return this.#engine.block(tpRank, region, blockId);
  }

  /**
   * What the scheduler and worker connectors still hold, by name; zeros (but for `listeners`) after
   * the last request.
   */
  outstanding(): Readonly<Record<string, number>> {
    const counts: Record<string, number> = { ...this.#engine.scheduler.outstanding() };
    for (const [name, count] of Object.entries(this.#engine.workersOutstanding()))
      counts[name] = (counts[name] ?? 0) + count;
    return counts;
  }

  /** Closes the connectors and frees the cache. The transport and the side channel stay open. */
  close(): Promise<void> {
    return this.#engine.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

function resolveReceived(
  { finishedReceiving, failedReceiving }: WorkerOutput,
  receiving: Receiving,
): void {
  for (const id of finishedReceiving) {
    receiving.get(id)?.(failedReceiving.find(({ requestId }) => requestId === id));
    receiving.delete(id);
  }
}

/**
 * Opens a decode engine without a model: one worker connector per rank, caches filled with
 * `UNWRITTEN_BYTE`, a listener on the side channel where the connector needs one.
 *
 * @throws those of the connector, the transport and the side channel; what was opened is closed
 * then.
 */
export async function openHeadlessDecode(options: HeadlessDecodeOptions): Promise<HeadlessDecode> {
  const receiving: Receiving = new Map();
  const engine = await HeadlessEngine.open({
    ...options,
    connector: options.connector ?? pullConnector,
    announcedHash: options.announcedHash,
    keepExtension: true,
    fill: UNWRITTEN_BYTE,
    onOutput: (output) => resolveReceived(output, receiving),
  });
  return new HeadlessDecode(engine, options.cache.groups.length, receiving);
}
