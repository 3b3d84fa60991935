import type { BlockIds, KvTransferParams } from "@kv/interface";
import { afterEach, beforeEach, expect } from "vitest";
import { type RunningRequest, type TestEngine, testEngine } from "./engine.js";
import type { ConnectorPair, ConnectorSuiteOptions } from "./pair.js";

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
  readonly seed: number;
  readonly blockIds: BlockIds;
  /** What the proxy carries to the decode side. */
  readonly params: KvTransferParams;
}

export interface Fixture {
  pair(): ConnectorPair;
  prefill(): TestEngine;
  decode(): TestEngine;
  /** Steps both engines until it is so. */
  until(what: string, predicate: () => boolean): Promise<void>;
  rounds(count: number): Promise<void>;
  /** Lets time pass, without steps, until it is so. */
  eventually(what: string, predicate: () => boolean): Promise<void>;
  /** A prompt that the prefill side has computed, and whose blocks it keeps. */
  prefilled(requestId: string, numTokens: number, seed: number): Promise<Prefilled>;
  /** Throws unless the blocks hold what the prefill side computed for `prompt`, from token `fromToken` on. */
  expectArrived(prompt: Prefilled, running: RunningRequest, fromToken?: number): void;
  /** Closes the connectors of both engines, while time passes. */
  closeBoth(): Promise<void>;
  /** Everything has come to rest: no blocks kept, nothing outstanding, nothing touched that is free. */
  expectIdle(): Promise<void>;
}

/** Keys of `outstanding` that are not a request's: the listener stays until `close`. */
const OUTLIVES_REQUESTS = ["listeners"];

export function createFixture(options: ConnectorSuiteOptions): Fixture {
  let pair: ConnectorPair | undefined;
  let engines: { prefill: TestEngine; decode: TestEngine } | undefined;
  /** What the prefill side had computed, for comparison after its blocks are gone. */
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

  /** Awaits while time passes. */
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
    async eventually(what, predicate) {
      for (let round = 0; round < 1000; round++) {
        if (predicate()) return;
        await self.pair().progress();
      }
      expect.fail(`${what}: not so after 1000 turns`);
    },
    async until(what, predicate) {
      for (let round = 0; round < (options.maxRounds ?? 20_000); round++) {
        if (predicate()) return;
        await self.rounds(1);
      }
      const outstanding = JSON.stringify([self.prefill(), self.decode()].map(outstandingOf));
      expect.fail(`${what}: not so after ${options.maxRounds ?? 20_000} rounds; outstanding ${outstanding}`);
    },
    async prefilled(requestId, numTokens, seed) {
      const engine = self.prefill();
      const running = engine.admit(engine.request(requestId, numTokens, REMOTE_DECODE), 0);
      expect(running.externalTokens).toBe(0);
      // What the forward pass of that step leaves: a connector that stages copies it within the step.
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
      if (params === undefined) return expect.fail(`prefill of ${requestId} answered no kv_transfer_params`);
      expect(params.do_remote_prefill).toBe(true);
      return { requestId, numTokens, seed, blockIds: running.blockIds, params };
    },
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
              // Of a last block that the prompt does not fill, only the begin is the same in every layout.
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
      await self.until("everything has come to rest", () =>
        both.every((engine) => engine.kept === 0 && Object.keys(outstandingOf(engine)).length === 0),
      );
      for (const engine of both) {
        expect(engine.end.scheduler.hasPendingWork()).toBe(false);
        engine.expectFreeBlocksUntouched();
      }
    },
  };
  return self;
}

/** What is not zero, by side. */
function outstandingOf({ end }: TestEngine): Record<string, number> {
  const held: Record<string, number> = {};
  const note = (side: string, counts: Readonly<Record<string, number>>): void => {
    for (const [key, count] of Object.entries(counts)) {
      if (count !== 0 && !OUTLIVES_REQUESTS.includes(key)) held[`${side}.${key}`] = count;
    }
  };
  note("scheduler", end.scheduler.outstanding());
  // What waits for the next step is outstanding too, though no key names it.
  note("scheduler", { hasPendingWork: end.scheduler.hasPendingWork() ? 1 : 0 });
  for (const [index, worker] of end.workers.entries()) note(`worker${index}`, worker.outstanding());
  return held;
}
