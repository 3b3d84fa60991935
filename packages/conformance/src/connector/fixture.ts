import type { BlockIds, KvTransferParams } from "@kv/interface";
import { afterEach, beforeEach, expect } from "vitest";
import type { ConnectorPair, ConnectorSuiteOptions } from "./engine.js";
import { type RunningRequest, type TestEngine, testEngine } from "./engine.js";

/** `kv_transfer_params` that a proxy sends to the prefill side. */
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
  readonly seed: number;
  readonly blockIds: BlockIds;
  /** `kv_transfer_params` for the decode side. */
  readonly params: KvTransferParams;
}

export interface Fixture {
  pair(): ConnectorPair;
  prefill(): TestEngine;
  decode(): TestEngine;
  /** Steps both engines until the predicate is true. */
  until(condition: string, predicate: () => boolean): Promise<void>;
  rounds(count: number): Promise<void>;
  /** Lets time pass, without steps, until the predicate is true. */
  eventually(condition: string, predicate: () => boolean): Promise<void>;
  /** Computes a prompt on the prefill side, which keeps its blocks. */
  prefilled(requestId: string, numTokens: number, seed: number): Promise<Prefilled>;
  /** Admits a prompt on the decode side, and waits until its KV has arrived. */
  received(prompt: Prefilled, numComputedTokens?: number): Promise<RunningRequest>;
  /** Waits until the prefill side has freed the blocks of a request. */
  freed(requestId: string): Promise<void>;
  /** Throws unless the blocks hold the KV of `prompt` from token `fromToken` on. */
  expectArrived(prompt: Prefilled, running: RunningRequest, fromToken?: number): void;
  /** Closes the connectors of both engines while time passes. */
  closeBoth(): Promise<void>;
  /**
   * Waits until no blocks are kept and nothing is outstanding, and checks that no free block was
   * written.
   */
  expectIdle(): Promise<void>;
}

/** Keys of `outstanding` that may stay until `close`. */
const OUTLIVES_REQUESTS = ["listeners"];

export function createFixture(options: ConnectorSuiteOptions): Fixture {
  let pair: ConnectorPair | undefined;
  let engines: { prefill: TestEngine; decode: TestEngine } | undefined;
  /** The KV of each prompt, for comparison after its blocks are freed. */
  const computed = new Map<string, Uint8Array[][][]>();

  beforeEach(async () => {
    pair = await options.createPair();
    engines = { prefill: testEngine(pair.prefill), decode: testEngine(pair.decode) };
    await engines.prefill.open();
    await engines.decode.open();
  });
  afterEach(async () => {
    computed.clear();
    await self.closeBoth();
    await pair?.close();
    pair = undefined;
    engines = undefined;
  });

  function present<T>(value: T | undefined): T {
    if (value === undefined) throw new Error("the pair of the suite was not created");
    return value;
  }

  /** Awaits a promise while time passes. */
  async function waitFor(promise: Promise<unknown>): Promise<void> {
    let settled = false;
    const outcome = promise.finally(() => {
      settled = true;
    });
    outcome.catch(() => {});
    while (!settled) await present(pair).progress();
    await outcome;
  }

  const self: Fixture = {
    pair: () => present(pair),
    prefill: () => present(engines).prefill,
    decode: () => present(engines).decode,
    async rounds(count) {
      for (let round = 0; round < count; round++) {
        await waitFor(Promise.all([self.prefill().step(), self.decode().step()]));
        await self.pair().progress();
      }
    },
    async eventually(condition, predicate) {
      for (let round = 0; round < 1000; round++) {
        if (predicate()) return;
        await self.pair().progress();
      }
      expect.fail(`${condition}: still false after 1000 turns`);
    },
    async until(condition, predicate) {
      for (let round = 0; round < (options.maxRounds ?? 20_000); round++) {
        if (predicate()) return;
        await self.rounds(1);
      }
      const outstanding = JSON.stringify([self.prefill(), self.decode()].map(outstandingOf));
      expect.fail(
        `${condition}: still false after ${options.maxRounds ?? 20_000} rounds; outstanding ${outstanding}`,
      );
    },
    async prefilled(requestId, numTokens, seed) {
      const engine = self.prefill();
      const running = engine.admit(engine.request(requestId, numTokens, REMOTE_DECODE), 0);
      expect(running.externalTokens).toBe(0);
      // The forward pass of this step; a connector that stages copies its result within the step.
      engine.compute(running.blockIds, seed);
      await self.rounds(1);
      computed.set(
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
      return { requestId, numTokens, seed, blockIds: running.blockIds, params };
    },
    async received({ requestId, numTokens, params }, numComputedTokens = 0) {
      const engine = self.decode();
      const running = engine.admit(engine.request(requestId, numTokens, params), numComputedTokens);
      expect(running.externalTokens).toBe(numTokens - numComputedTokens);
      await self.until("the prompt has arrived", () => engine.received.has(requestId));
      return running;
    },
    freed: (requestId) =>
      self.until("the prefill side has freed its blocks", () => self.prefill().sent.has(requestId)),
    expectArrived(prompt, running, fromToken = 0) {
      const engine = self.decode();
      const { compare } = self.pair();
      if (compare !== undefined) {
        compare(prompt.blockIds, running.blockIds, prompt.numTokens);
        return;
      }
      const { blockSize } = engine.config;
      engine.end.caches.forEach((cache, worker) => {
        cache.regions.forEach((_, region) => {
          const blocks = computed.get(prompt.requestId)?.[worker]?.[region];
          let at = 0;
          for (const ids of running.blockIds) {
            ids.forEach((id, index) => {
              const source = blocks?.[at++];
              const from = index * blockSize;
              if (from < fromToken) return;
              const got = engine.block(worker, region, id);
              // Where the prompt does not fill its last block, only the first bytes are the same in
              // every layout.
              const length = from + blockSize <= prompt.numTokens ? got.length : 4;
              expect(got.subarray(0, length)).toEqual(source?.subarray(0, length));
            });
          }
        });
      });
    },
    closeBoth: () => waitFor(Promise.all([self.prefill().close(), self.decode().close()])),
    async expectIdle() {
      const both = [self.prefill(), self.decode()];
      await self.until("both engines are idle", () =>
        both.every(
          (engine) => engine.kept === 0 && Object.keys(outstandingOf(engine)).length === 0,
        ),
      );
      for (const engine of both) {
        expect(engine.end.scheduler.hasPendingWork()).toBe(false);
        engine.expectFreeBlocksUntouched();
      }
    },
  };
  return self;
}

/** Returns the counters that are not zero, by side. */
function outstandingOf({ end }: TestEngine): Record<string, number> {
  const held: Record<string, number> = {};
  const note = (side: string, counts: Readonly<Record<string, number>>): void => {
    for (const [key, count] of Object.entries(counts)) {
      if (count !== 0 && !OUTLIVES_REQUESTS.includes(key)) held[`${side}.${key}`] = count;
    }
  };
  note("scheduler", end.scheduler.outstanding());
  // Work that waits for the next step counts as outstanding, although it has no key.
  note("scheduler", { hasPendingWork: end.scheduler.hasPendingWork() ? 1 : 0 });
  for (const [index, worker] of end.workers.entries()) note(`worker${index}`, worker.outstanding());
  return held;
}
