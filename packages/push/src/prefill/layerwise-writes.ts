import type { LeaseOrder, SendableRequest } from "@kv/connector/building-blocks";
import { type BlockIds, KvError } from "@kv/interface";
import type { Registration } from "@kv/protocol";
import type { WriteDispatcher } from "./write-blocks.js";

/** Options of `LayerwiseWrites`. */
export interface LayerwiseWritesOptions {
  readonly dispatcher: Pick<WriteDispatcher, "write">;
  /** Names of all regions. The regions that are computed last are left to the final write. */
  readonly regions: readonly string[];
}

/** What the writes need to know of a running request. */
interface RunningRequest extends Pick<SendableRequest, "requestId" | "wireId" | "generation"> {
  readonly order: SendableRequest;
}

/** The layer-wise writes for one registration. */
interface Entry {
  readonly request: RunningRequest;
  /** The blocks that are read. After a preemption the request has others. */
  readonly promptBlockIds: BlockIds;
  readonly started: Set<string>;
  readonly written: Set<string>;
  readonly controller: AbortController;
  readonly running: Set<Promise<void>>;
}

const NONE: ReadonlySet<string> = new Set();

/**
 * Layer-wise push: writes the layers of a running request that are computed, while later layers are
 * being computed. These writes are only an optimization: the consumer is not notified, and the
 * final write repeats a region that failed, or that was written for another request than the one
 * that the registration finally matches. The final write waits for them and notifies the consumer.
 */
export class LayerwiseWrites {
  readonly #options: LayerwiseWritesOptions;
  readonly #entries = new Map<string, Entry>();
  /**
   * The computed regions of each running request, in the blocks of this order: a request that is
   * preempted runs again with others.
   */
  readonly #computed = new Map<
    RunningRequest,
    { readonly order: unknown; readonly regions: Set<string> }
  >();

  constructor(options: LayerwiseWritesOptions) {
    this.#options = options;
  }

  /**
   * Records that these regions of a request are computed, and writes them to the registrations that
   * wait for it.
   */
  layerComputed(
    request: RunningRequest,
    regions: readonly string[],
    waiting: Iterable<readonly [key: string, registration: Registration]>,
  ): void {
    const { order } = request;
    const known = this.#computed.get(request);
    const computed = known?.order === order ? known.regions : new Set<string>();
    this.#computed.set(request, { order, regions: computed });
    for (const region of regions) computed.add(region);
    if (this.#options.regions.every((region) => computed.has(region))) return;
    for (const [key, registration] of waiting) this.#write(key, registration, request, computed);
  }

  /**
   * Ends the layer-wise writes for a registration. Resolves with the regions of this request that
   * were written, when none of the writes touches memory any more. An abort of the signal aborts
   * the writes.
   */
  async finish(key: string, order: LeaseOrder, signal: AbortSignal): Promise<ReadonlySet<string>> {
    const entry = this.#entries.get(key);
    if (entry === undefined) return NONE;
    const onAbort = () => entry.controller.abort(signal.reason);
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort);
    await allEnded(entry);
    signal.removeEventListener("abort", onAbort);
    this.#entries.delete(key);
    const { request, promptBlockIds, written } = entry;
    const isSame =
      request.wireId === order.wireId &&
      request.generation === order.generation &&
      sameBlocks(promptBlockIds, order.promptBlockIds);
    return isSame ? written : NONE;
  }

  /**
   * Aborts the layer-wise writes for a registration. Resolves when none of them touches memory any
   * more.
   */
  async abort(key: string, reason: KvError): Promise<void> {
    const entry = this.#entries.get(key);
    if (entry === undefined) return;
    entry.controller.abort(reason);
    await allEnded(entry);
    if (this.#entries.get(key) === entry) this.#entries.delete(key);
  }

  /**
   * Aborts the writes of a request that has ended. Undefined if no write reads its blocks, else a
   * promise that resolves when no write reads them.
   */
  release(request: RunningRequest): Promise<void> | undefined {
    this.#computed.delete(request);
    const keys = [...this.#entries]
      .filter(([, entry]) => entry.request === request)
      .map(([key]) => key);
    if (keys.length === 0) return undefined;
    const reason = new KvError("KV_REQUEST_ABORTED", `request ${request.requestId} has ended`);
    return Promise.all(keys.map((key) => this.abort(key, reason))).then(() => {});
  }

  get size(): number {
    return this.#entries.size;
  }

  /** Aborts all layer-wise writes. The dispatcher's `idle` waits for them. */
  close(): void {
    const reason = new KvError("KV_AGENT_CLOSED", "the worker was closed");
    for (const { controller } of this.#entries.values()) controller.abort(reason);
    this.#computed.clear();
  }

  #write(
    key: string,
    registration: Registration,
    request: RunningRequest,
    computed: ReadonlySet<string>,
  ): void {
    const { own } = registration;
    const { promptBlockIds, numTokens, requestId, traceparent } = request.order;
    if (own === undefined || promptBlockIds === undefined || numTokens === undefined) return;
    const entry = this.#entries.get(key) ?? {
      request,
      promptBlockIds,
      started: new Set<string>(),
      written: new Set<string>(),
      controller: new AbortController(),
      running: new Set<Promise<void>>(),
    };
    // Another request with the same base id came first. The final write of the one that finishes
    // writes all regions.
    if (entry.request !== request || entry.controller.signal.aborted) return;
    this.#entries.set(key, entry);
    const regions = new Set([...computed].filter((region) => !entry.started.has(region)));
    for (const region of regions) entry.started.add(region);
    if (regions.size === 0) return;
    const order = { requestId, promptBlockIds, numTokens, traceparent };
    const work = this.#options.dispatcher
      .write({
        registration,
        ranks: [own.rank],
        order,
        includesRegion: (region) => regions.has(region),
        last: false,
        controller: entry.controller,
      })
      .then((error) => {
        if (error === undefined) for (const region of regions) entry.written.add(region);
      });
    entry.running.add(work);
    void work.then(() => entry.running.delete(work));
  }
}

async function allEnded({ running }: Entry): Promise<void> {
  while (running.size > 0) await Promise.all(running);
}

function sameBlocks(a: BlockIds, b: BlockIds): boolean {
  return a.length === b.length && a.every((ids, group) => ids.join() === b[group]?.join());
}
