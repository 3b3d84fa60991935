import { type LeaseOrder, TaskTracker } from "@kv/connector/building-blocks";
import { type BlockIds, KvError } from "@kv/interface";
import type { Registration } from "@kv/protocol";
import type { ProducedRequest } from "./registrations.js";
import type { WriteDispatcher } from "./write-blocks.js";

export interface LayerwiseWritesOptions {
  readonly dispatcher: Pick<WriteDispatcher, "write">;
  /** The last computed regions are left to the final write. */
  readonly regions: readonly string[];
}

type RunningRequest = Pick<ProducedRequest, "requestId" | "wireId" | "generation" | "order">;

interface Entry {
  readonly request: RunningRequest;
  /** A preemption changes them. */
  readonly promptBlockIds: BlockIds;
  readonly started: Set<string>;
  readonly written: Set<string>;
  readonly controller: AbortController;
  readonly running: TaskTracker;
}

const NONE: ReadonlySet<string> = new Set();

/**
 * Writes a running request's computed layers while later ones are computed, without a notification.
 * The final write repeats regions that failed, or that went out for another request than the one
 * finally matched.
 */
export class LayerwiseWrites {
  readonly #options: LayerwiseWritesOptions;
  readonly #entries = new Map<string, Entry>();
  /** Valid for this order's blocks: a preempted request gets others. */
  readonly #computed = new Map<
    RunningRequest,
    { readonly order: unknown; readonly regions: Set<string> }
  >();

  constructor(options: LayerwiseWritesOptions) {
    this.#options = options;
  }

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

  /** Waits until no write touches memory, and returns the request's written regions. */
  async finish(key: string, order: LeaseOrder, signal: AbortSignal): Promise<ReadonlySet<string>> {
    const entry = this.#entries.get(key);
    if (entry === undefined) return NONE;
    const onAbort = () => entry.controller.abort(signal.reason);
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort);
    await entry.running.idle();
    signal.removeEventListener("abort", onAbort);
    this.#entries.delete(key);
    const { request, promptBlockIds, written } = entry;
    const isSame =
      request.wireId === order.wireId &&
      request.generation === order.generation &&
      sameBlocks(promptBlockIds, order.promptBlockIds);
    return isSame ? written : NONE;
  }

  /** Resolves when no aborted write touches memory. */
  async abort(key: string, reason: KvError): Promise<void> {
    const entry = this.#entries.get(key);
    if (entry === undefined) return;
    entry.controller.abort(reason);
    await entry.running.idle();
    if (this.#entries.get(key) === entry) this.#entries.delete(key);
  }

  /**
   * Aborts an ended request's writes. Resolves when none reads its blocks; undefined if none does
   * now.
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

  /** The dispatcher's `idle` waits for the aborted writes. */
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
      running: new TaskTracker(),
    };
    // Another request with the same base id came first.
    if (entry.request !== request || entry.controller.signal.aborted) return;
    this.#entries.set(key, entry);
    const regions = new Set([...computed].filter((region) => !entry.started.has(region)));
    for (const region of regions) entry.started.add(region);
    if (regions.size === 0) return;
    const order = { requestId, promptBlockIds, numTokens, traceparent };
    entry.running.track(
      this.#options.dispatcher
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
        }),
    );
  }
}

function sameBlocks(a: BlockIds, b: BlockIds): boolean {
  return a.length === b.length && a.every((ids, group) => ids.join() === b[group]?.join());
}
