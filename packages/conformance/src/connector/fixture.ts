import type { BlockIds, KvTransferParams } from "@kv/interface";
import { afterEach, beforeEach, expect } from "vitest";
import { TIME_LIMIT_MS } from "../time-limits.js";
import {
  type ConnectorPair,
  type ConnectorSuiteOptions,
  type RunningRequest,
  TestEngine,
} from "./engine.js";

/** What a proxy sends to the prefill side. */
export const REMOTE_DECODE: KvTransferParams = {
  do_remote_decode: true,
  do_remote_prefill: false,
  remote_engine_id: null,
  remote_block_ids: null,
  remote_host: null,
  remote_port: null,
};

export interface Prefilled {
  readonly requestId: string;
  readonly numTokens: number;
  readonly blockIds: BlockIds;
  readonly params: KvTransferParams;
}

/** May stay until `close`. */
const OUTLIVES_REQUESTS = ["listeners"];

/** New engines for each test. */
export class Fixture {
  readonly #options: ConnectorSuiteOptions;
  #pair: ConnectorPair | undefined;
  #engines: { readonly prefill: TestEngine; readonly decode: TestEngine } | undefined;
  /** Each prompt's KV, kept after its blocks are freed. */
  readonly #computed = new Map<string, Uint8Array[][][]>();

  constructor(options: ConnectorSuiteOptions) {
    this.#options = options;
    beforeEach(async () => {
      const pair = await options.createPair();
      this.#pair = pair;
      this.#engines = {
        prefill: new TestEngine(pair.prefill),
        decode: new TestEngine(pair.decode),
      };
      await this.prefill.open();
      await this.decode.open();
    }, TIME_LIMIT_MS);
    afterEach(async () => {
      this.#computed.clear();
      await this.closeBoth();
      await this.pair.close();
      this.#pair = undefined;
      this.#engines = undefined;
    }, TIME_LIMIT_MS);
  }

  get pair(): ConnectorPair {
    return present(this.#pair);
  }

  get prefill(): TestEngine {
    return present(this.#engines).prefill;
  }

  get decode(): TestEngine {
    return present(this.#engines).decode;
  }

  async rounds(count: number): Promise<void> {
    for (let round = 0; round < count; round++) {
      await this.#waitFor(Promise.all([this.prefill.step(), this.decode.step()]));
      await this.pair.progress();
    }
  }

  /** Lets time pass, without steps. */
  async eventually(condition: string, predicate: () => boolean): Promise<void> {
    for (let round = 0; round < 1000; round++) {
      if (predicate()) return;
      await this.pair.progress();
    }
    expect.fail(`${condition}: still false after 1000 turns`);
  }

  /** Steps both engines. */
  async until(condition: string, predicate: () => boolean): Promise<void> {
    const { maxRounds = 20_000 } = this.#options;
    for (let round = 0; round < maxRounds; round++) {
      if (predicate()) return;
      await this.rounds(1);
    }
    const outstanding = JSON.stringify([this.prefill, this.decode].map(outstandingOf));
    expect.fail(`${condition}: still false after ${maxRounds} rounds; outstanding ${outstanding}`);
  }

  /** Computes a prompt and keeps its blocks. */
  async prefilled(requestId: string, numTokens: number, seed: number): Promise<Prefilled> {
    const engine = this.prefill;
    const running = engine.admit(engine.request(requestId, numTokens, REMOTE_DECODE), 0);
    expect(running.externalTokens).toBe(0);
    // A connector that stages copies the forward pass's result within this step.
    engine.compute(running.blockIds, seed);
    await this.rounds(1);
    this.#computed.set(
      requestId,
      engine.end.caches.map((cache, worker) =>
        cache.regions.map((_, region) =>
          running.blockIds.flat().map((id) => engine.block(worker, region, id).slice()),
        ),
      ),
    );
    const params = engine.finish(running, "length");
    expect(engine.kept).toBeGreaterThan(0);
    if (params === undefined)
      return expect.fail(`prefill of ${requestId} returned no kv_transfer_params`);
    expect(params.do_remote_prefill).toBe(true);
    return { requestId, numTokens, blockIds: running.blockIds, params };
  }

  admitted({ requestId, numTokens, params }: Prefilled, numComputedTokens = 0): RunningRequest {
    const request = this.decode.request(requestId, numTokens, params);
    const running = this.decode.admit(request, numComputedTokens);
    expect(running.externalTokens).toBe(numTokens - numComputedTokens);
    return running;
  }

  async arrived(...requestIds: readonly string[]): Promise<void> {
    const { received } = this.decode;
    await this.until(`${requestIds} has arrived`, () => requestIds.every((id) => received.has(id)));
  }

  /** Admits a prompt and waits for its KV. */
  async received(prompt: Prefilled): Promise<RunningRequest> {
    const running = this.admitted(prompt);
    await this.arrived(prompt.requestId);
    return running;
  }

  /** Waits until the prefill side has freed the request's blocks. */
  freed(requestId: string): Promise<void> {
    const { sent } = this.prefill;
    return this.until("the prefill side has freed its blocks", () => sent.has(requestId));
  }

  /** The blocks must hold `prompt`'s KV from `fromToken` on. */
  expectArrived(prompt: Prefilled, running: RunningRequest, fromToken = 0): void {
    const { decode: engine, pair } = this;
    if (pair.compare !== undefined) {
      pair.compare(prompt.blockIds, running.blockIds, prompt.numTokens);
      return;
    }
    const { blockSize } = engine.config;
    engine.end.caches.forEach((cache, worker) => {
      cache.regions.forEach((_, region) => {
        const blocks = this.#computed.get(prompt.requestId)?.[worker]?.[region];
        let at = 0;
        for (const ids of running.blockIds) {
          ids.forEach((id, index) => {
            const source = blocks?.[at++];
            const from = index * blockSize;
            if (from < fromToken) return;
            const got = engine.block(worker, region, id);
            // In a partial block, layouts agree only on the first bytes.
            const length = from + blockSize <= prompt.numTokens ? got.length : 4;
            expect(got.subarray(0, length)).toEqual(source?.subarray(0, length));
          });
        }
      });
    });
  }

  closeBoth(): Promise<void> {
    return this.#waitFor(Promise.all([this.prefill.close(), this.decode.close()]));
  }

  /** Waits until nothing is kept or outstanding; no free block may have been written. */
  async expectIdle(): Promise<void> {
    const both = [this.prefill, this.decode];
    await this.until("both engines are idle", () =>
      both.every((engine) => engine.kept === 0 && Object.keys(outstandingOf(engine)).length === 0),
    );
    for (const engine of both) {
      expect(engine.end.scheduler.hasPendingWork()).toBe(false);
      engine.expectFreeBlocksUntouched();
    }
  }

  async #waitFor(promise: Promise<unknown>): Promise<void> {
    let settled = false;
    const outcome = promise.finally(() => {
      settled = true;
    });
    outcome.catch(() => {});
    while (!settled) await this.pair.progress();
    await outcome;
  }
}

function present<T>(value: T | undefined): T {
  if (value === undefined) throw new Error("the pair of the suite was not created");
  return value;
}

/** Counters that are not zero, by side. */
function outstandingOf({ end }: TestEngine): Record<string, number> {
  const held: Record<string, number> = {};
  const note = (side: string, counts: Readonly<Record<string, number>>): void => {
    for (const [key, count] of Object.entries(counts)) {
      if (count !== 0 && !OUTLIVES_REQUESTS.includes(key)) held[`${side}.${key}`] = count;
    }
  };
  note("scheduler", end.scheduler.outstanding());
  // Work for the next step is outstanding, but has no key.
  note("scheduler", { hasPendingWork: end.scheduler.hasPendingWork() ? 1 : 0 });
  for (const [index, worker] of end.workers.entries()) note(`worker${index}`, worker.outstanding());
  return held;
}
