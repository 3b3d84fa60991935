import type {
  BlockIds,
  ConnectorModule,
  ConnectorRequest,
  FailedReceive,
  WorkerOutput,
} from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { HeadlessEngine, type HeadlessEngineOptions } from "./headless-engine.js";

/** Every unwritten byte of a headless D's cache. */
export const UNWRITTEN_BYTE = 0xa5;

/** Options of `openHeadlessDecode`. */
export interface HeadlessDecodeOptions extends HeadlessEngineOptions {
  /** Receives the KV; `pushConnector` for a P that pushes. @default pullConnector */
  readonly connector?: ConnectorModule | undefined;
  /** Replaces the engine's own hash, which a pushing P compares with its own. */
  readonly announcedHash?: string | undefined;
}

/** How `HeadlessDecode.receive` ended. */
export interface ReceiveResult {
  /** Undefined when the KV arrived. */
  readonly failure: FailedReceive | undefined;
  readonly aborted: boolean;
}

/** A decode engine without a model; the received bytes can be read. */
export class HeadlessDecode {
  readonly #engine: HeadlessEngine;
  readonly #numGroups: number;
  readonly #receiving = new Map<string, (failure: FailedReceive | undefined) => void>();

  constructor(engine: HeadlessEngine, numGroups: number) {
    this.#engine = engine;
    this.#numGroups = numGroups;
    engine.onOutput = (output) => this.#settle(output);
  }

  get tpSize(): number {
    return this.#engine.tpSize;
  }

  /**
   * Receives KV into `blockIds`, logical ids per KV cache group, after `numComputedTokens` of the
   * prompt (default 0). Without tokens to receive, it only notifies P. Resolves when nothing
   * accesses the blocks. `signal` aborts as an engine does.
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
    const finished = new Promise<FailedReceive | undefined>((resolve) => {
      if (tokens === 0) resolve(undefined);
      else this.#receiving.set(requestId, resolve);
    });
    scheduler.afterAllocation(request, blockIds, tokens);
    this.#engine.step();
    let aborted = false;
    const abort = () => {
      if (!this.#receiving.has(requestId)) return;
      aborted = true;
      const { keepBlocks } = scheduler.requestFinished(request, blockIds, "aborted");
      this.#engine.step();
      // A transfer may still write: the workers report its end.
      if (!keepBlocks) this.#end(requestId, undefined);
    };
    if (signal?.aborted === true) abort();
    else signal?.addEventListener("abort", abort, { once: true });
    const failure = await finished;
    signal?.removeEventListener("abort", abort);
    return { failure, aborted };
  }

  #settle({ finishedReceiving, failedReceiving }: WorkerOutput): void {
    for (const id of finishedReceiving)
      this.#end(
        id,
        failedReceiving.find(({ requestId }) => requestId === id),
      );
  }

  #end(requestId: string, failure: FailedReceive | undefined): void {
    this.#receiving.get(requestId)?.(failure);
    this.#receiving.delete(requestId);
  }

  /** Has the connector extend the lease of a request that waits for blocks. */
  queue(request: ConnectorRequest): void {
    this.#engine.scheduler.requestQueued?.(request);
    this.#engine.step();
  }

  /** Aborts a request without blocks, so that P is notified. */
  giveUpQueued(request: ConnectorRequest): void {
    const { scheduler } = this.#engine;
    const none = Array.from({ length: this.#numGroups }, () => []);
    scheduler.requestQueued?.(request);
    scheduler.requestFinished(request, none, "aborted");
    this.#engine.step();
  }

  finish(request: ConnectorRequest, blockIds: BlockIds): void {
    this.#engine.scheduler.requestFinished(request, blockIds, "length");
    this.#engine.step();
  }

  block(tpRank: number, region: number, blockId: number): Uint8Array {
    return this.#engine.block(tpRank, region, blockId);
  }

  /** What the connectors hold, by name; zeros (but for `listeners`) after the last request. */
  outstanding(): Readonly<Record<string, number>> {
    return this.#engine.outstanding();
  }

  /** The transport and the side channel stay open. */
  close(): Promise<void> {
    return this.#engine.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

/**
 * Opens a worker per rank with caches of `UNWRITTEN_BYTE`, and a listener where needed.
 *
 * @throws those of the connector, the transport and the side channel; what was opened is closed
 * then.
 */
export async function openHeadlessDecode(options: HeadlessDecodeOptions): Promise<HeadlessDecode> {
  const engine = await HeadlessEngine.open({
    ...options,
    connector: options.connector ?? pullConnector,
    announcedHash: options.announcedHash,
    keepExtension: true,
    fill: UNWRITTEN_BYTE,
  });
  return new HeadlessDecode(engine, options.cache.groups.length);
}
