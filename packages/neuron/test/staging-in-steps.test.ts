import type { ConnectorPair } from "@kv/conformance/connector";
import type {
  BlockIds,
  ConnectorRequest,
  KvTransferParams,
  StepMetadata,
  Transport,
} from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { afterEach, describe, expect, it, test } from "vitest";
import { type StagedPairOptions, stagedPair } from "./staged-pair.js";

let pair: ConnectorPair;

afterEach(async () => {
  const closing = Promise.all(
    [pair.prefill, pair.decode].map(async ({ scheduler, workers }) => {
      await Promise.all(workers.map((worker) => worker.close()));
      await scheduler.close();
    }),
  );
  await waitFor(closing);
  await pair.close();
});

/** Awaits while virtual time passes. */
async function waitFor<T>(promise: Promise<T>): Promise<T> {
  let settled = false;
  const outcome = promise.finally(() => {
    settled = true;
  });
  outcome.catch(() => {});
  while (!settled) await pair.progress();
  return outcome;
}

async function open(options: Partial<StagedPairOptions> = {}): Promise<void> {
  pair = await stagedPair({ connector: pullConnector, ...options });
  for (const { scheduler, workers, caches } of [pair.prefill, pair.decode]) {
    for (const [rank, worker] of workers.entries()) {
      const cache = caches[rank];
      if (cache !== undefined) await worker.registerKvCaches(cache);
    }
    await scheduler.setHandshakeMetadata(
      await Promise.all(workers.map((worker) => worker.handshakeMetadata())),
    );
  }
}

const asked = (requestId: string, tokens: number, params: KvTransferParams): ConnectorRequest => ({
  requestId,
  numPromptTokens: tokens,
  promptTokenIds: Array.from({ length: tokens }, (_, at) => at),
  kvTransferParams: params,
});
const produced = (requestId: string, tokens: number) =>
  asked(requestId, tokens, { do_remote_decode: true, do_remote_prefill: false });

type Side = "prefill" | "decode";

/** Runs one engine step and returns its output. */
async function step(side: Side, computed?: Record<string, number>) {
  const { scheduler, workers } = pair[side];
  const metadata = JSON.parse(JSON.stringify(scheduler.buildStepMetadata())) as StepMetadata;
  for (const worker of workers) worker.startLoad(metadata);
  await waitFor(Promise.all(workers.map((worker) => worker.waitForSave(metadata, computed))));
  const outputs = workers.map((worker) => worker.collectFinished());
  const [output] = outputs;
  if (output === undefined) throw new Error("no worker");
  scheduler.applyWorkerOutput(output);
  return output;
}

async function until(side: Side, requestId: string) {
  for (let round = 0; round < 2000; round++) {
    const [output] = [await step(side), await pair.progress()];
    const failed = output.failedReceiving.find((failure) => failure.requestId === requestId);
    if (
      output.finishedReceiving.includes(requestId) ||
      output.finishedSending.includes(requestId)
    ) {
      return { failed, failedBlockIds: output.failedBlockIds };
    }
  }
  throw new Error(`${requestId} did not end`);
}

/** Admits a prompt on the prefill side. */
function admitted(requestId: string, tokens: number, blockIds: BlockIds) {
  const { scheduler } = pair.prefill;
  const request = produced(requestId, tokens);
  expect(scheduler.matchedTokens(request, 0).wait).not.toBe(true);
  scheduler.afterAllocation(request, blockIds, 0);
  return {
    end: (reason: "aborted" | "error" | "length") =>
      scheduler.requestFinished(request, blockIds, reason),
  };
}

/** Computes a prompt on the prefill side and returns its parameters. */
async function prefill(...given: Parameters<typeof admitted>): Promise<KvTransferParams> {
  const { end } = admitted(...given);
  await step("prefill");
  return end("length").kvTransferParams ?? {};
}

describe("back-pressure", () => {
  test("a prompt waits in the engine's queue while the pool is full, and gets pool blocks when a reader is done", async () => {
    await open({ poolBlocks: 4 });
    const params = await prefill("a", 48, [[10, 11, 12]]);
    const { scheduler } = pair.prefill;
    expect(params["remote_block_ids"]).toEqual([[1, 2, 3]]);
    expect(scheduler.matchedTokens(produced("b", 20), 0)).toMatchObject({ tokens: 0, wait: true });
    expect(scheduler.outstanding()["stagingWaits"]).toBe(1);
    const consumer = asked("d", 48, params);
    const { tokens } = pair.decode.scheduler.matchedTokens(consumer, 0);
    pair.decode.scheduler.afterAllocation(consumer, [[20, 21, 22]], tokens);
    expect((await until("decode", "d")).failed).toBeUndefined();
    // The next step of the decode side tells P that its last reader is done.
    await step("decode");
    await until("prefill", "a");
    expect(scheduler.matchedTokens(produced("b", 20), 0).wait).not.toBe(true);
    scheduler.requestFinished(produced("b", 20), [[]], "aborted");
    expect(scheduler.outstanding()).toMatchObject({ stagedBlocks: 0, stagingWaits: 0 });
  });

  test("a transfer starts when the decode side's pool has room, in the order of arrival", async () => {
    await open({ poolBlocks: 7 });
    const params = [await prefill("a", 48, [[1, 2, 3]]), await prefill("b", 48, [[4, 5, 6]])];
    const { scheduler } = pair.decode;
    params.forEach((given, index) => {
      const request = asked(`d${index}`, 96, { ...given });
      expect(scheduler.matchedTokens(request, 0).tokens).toBe(48);
      scheduler.afterAllocation(request, [[1, 2, 3, 4, 5, 6]], 48);
    });
    // Two requests take three blocks each of a pool of six. A third request waits, without blocks
    // of the device.
    const third = asked("d2", 48, { ...params[0] });
    expect(scheduler.matchedTokens(third, 0)).toMatchObject({ tokens: 48, wait: true });
    expect(() => scheduler.afterAllocation(third, [[7, 8, 9]], 48)).toThrow("no room");
    expect(scheduler.outstanding()).toMatchObject({ stagedBlocks: 6, stagingWaits: 1 });
    const { staging } = scheduler.buildStepMetadata() as StepMetadata & {
      staging: { loads: { requestId: string }[] };
    };
    expect(staging.loads.map(({ requestId }) => requestId)).toEqual(["d0", "d1"]);
    scheduler.applyWorkerOutput({
      finishedSending: [],
      finishedReceiving: ["d0"],
      failedReceiving: [],
      failedBlockIds: [],
    });
    expect(scheduler.matchedTokens(third, 0).wait).not.toBe(true);
    scheduler.afterAllocation(third, [[7, 8, 9]], 48);
    const next = scheduler.buildStepMetadata() as typeof staging & StepMetadata;
    expect(next["staging"]).toMatchObject({ loads: [{ requestId: "d2" }], over: ["d0"] });
  });

  test("a prompt larger than the pool is rejected", async () => {
    await open({ poolBlocks: 3 });
    expect(() => pair.prefill.scheduler.matchedTokens(produced("a", 48), 0)).toThrowError(
      /needs 3 .* has 2/,
    );
  });
});

describe("chunked prefill", () => {
  test("each block is saved once, when it is full or the prompt has ended", async () => {
    const saves: number[] = [];
    await open({
      onCopied: (host, { wire }) => void (host === "p" && saves.push(...(wire[0] ?? []), 0)),
    });
    const { end } = admitted("a", 40, [[5, 6, 7]]);
    for (const tokens of [10, 20, 20, 40, 41]) await step("prefill", { a: tokens });
    expect(saves).toEqual([1, 0, 2, 3, 0]);
    end("aborted");
  });

  /** Groups of 16 and of 64 tokens per block, and the device blocks of a prompt of 150 tokens. */
  const UNEQUAL = [
    { kind: "full", layerNames: ["layers.0"] },
    { kind: "full", layerNames: ["layers.1"], blockSize: 64 },
  ];
  const BLOCKS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    [21, 22, 23],
  ];
  /** Opens a pair whose prefill side records the pool blocks of each save, per group. */
  async function openRecorded(options: Partial<StagedPairOptions> = {}): Promise<BlockIds[]> {
    const saves: BlockIds[] = [];
    await open({
      onCopied: (host, { wire }) => void (host === "p" && saves.push(wire)),
      ...options,
    });
    return saves;
  }

  test("vllm#30358: groups of 16 and 64 tokens per block are saved in blocks of their own, each once", async () => {
    const saves = await openRecorded({ groups: UNEQUAL });
    const { end } = admitted("a", 150, BLOCKS);
    for (const tokens of [64, 150]) await step("prefill", { a: tokens });
    expect(saves).toEqual([
      [[1, 2, 3, 4], [11]],
      [
        [5, 6, 7, 8, 9, 10],
        [12, 13],
      ],
    ]);
    end("aborted");
  });

  test("vllm#30419: with a prefix hit, each group loads the blocks after its own blocks of the hit", async () => {
    const loads: BlockIds[] = [];
    await open({
      groups: UNEQUAL,
      onCopied: (host, { wire }) => void (host === "d" && loads.push(wire)),
    });
    const params = await prefill("a", 150, BLOCKS);
    const request = asked("d", 150, params);
    const { scheduler } = pair.decode;
    scheduler.afterAllocation(request, BLOCKS, scheduler.matchedTokens(request, 64).tokens);
    expect(scheduler.outstanding()["stagedBlocks"]).toBe(8);
    expect((await until("decode", "d")).failed).toBeUndefined();
    expect(loads).toEqual([
      [
        [1, 2, 3, 4, 5, 6],
        [7, 8],
      ],
    ]);
  });

  test("a request that a step leaves out keeps the tokens that it was last named with (vllm#30358)", async () => {
    const saves = await openRecorded();
    const { end } = admitted("a", 100, [[1, 2, 3, 4, 5, 6, 7]]);
    for (const computed of [{ a: 64 }, {}, { other: 10 }, { a: 100 }])
      await step("prefill", computed);
    expect(saves).toEqual([[[1, 2, 3, 4]], [[5, 6, 7]]]);
    end("aborted");
  });

  test("a request that no step has named counts as computed, and so do all without a map", async () => {
    const saves = await openRecorded();
    const { end } = admitted("a", 40, [[5, 6, 7]]);
    await step("prefill", { other: 1 });
    await step("prefill");
    expect(saves).toEqual([[[1, 2, 3]], [[1, 2, 3]]]);
    end("aborted");
  });
});

describe.each([pullConnector, pushConnector])(
  "$name: a step that names no request",
  (connector) => {
    /** Fills the device blocks of a side's first rank with bytes of `seed`. */
    async function fill(side: Side, blockIds: readonly number[], seed: number): Promise<void> {
      for (const [at, { memory, offsetBytes, blockStrideBytes, blockLengthBytes }] of regionsOf(
        side,
      ).entries())
        for (const id of blockIds) {
          const bytes = new Uint8Array(blockLengthBytes).map(
            (_, byte) => seed + 7 * at + 13 * id + byte,
          );
          await waitFor(
            memory.scatter(
              Float64Array.of(offsetBytes + id * blockStrideBytes, bytes.length),
              bytes.buffer,
            ),
          );
        }
    }
    const bytesOf = (side: Side, blockIds: readonly number[]) =>
      regionsOf(side).map(({ memory, offsetBytes, blockStrideBytes, blockLengthBytes }) =>
        blockIds.map((id) =>
          memory.bytes.slice(offsetBytes + id * blockStrideBytes).subarray(0, blockLengthBytes),
        ),
      );
    const regionsOf = (side: Side) => pair[side].caches[0]?.regions ?? [];

    it.each([
      ["", []],
      [", and one that leaves the request out", [{}]],
    ] as const)(
      "H2: what it copies counts as not saved, after a step that named a part%s",
      async (_, more) => {
        const errors: string[] = [];
        await open({ connector, onError: (event) => void errors.push(event) });
        const blocks = [5, 6, 7];
        const { end } = admitted("a", 48, [blocks]);
        await fill("prefill", blocks, 1);
        await step("prefill", { a: 20 });
        await step("prefill");
        for (const computed of more) await step("prefill", computed);
        await fill("prefill", [6, 7], 101);
        await step("prefill", { a: 48 });
        const { kvTransferParams } = end("length");
        await step("prefill");
        const consumer = asked("a", 48, kvTransferParams ?? {});
        const { tokens } = pair.decode.scheduler.matchedTokens(consumer, 0);
        pair.decode.scheduler.afterAllocation(consumer, [[20, 21, 22]], tokens);
        expect((await until("decode", "a")).failed).toBeUndefined();
        expect(bytesOf("decode", [20, 21, 22])).toEqual(bytesOf("prefill", blocks));
        expect(errors).toEqual([]);
      },
    );

    it.each([
      ["names a part again", [{ a: 20 }, undefined, { a: 40 }], 40],
      ["leaves the request out", [{ a: 20 }, {}], 20],
    ])(
      "H2: an engine that %s, and does not name the last tokens, is told",
      async (_, steps, savedTokens) => {
        const errors: unknown[] = [];
        await open({ connector, onError: (event, details) => void errors.push([event, details]) });
        const { end } = admitted("a", 48, [[5, 6, 7]]);
        for (const computed of steps) await step("prefill", computed);
        end("length");
        await step("prefill");
        const details = { requestId: "a", savedTokens, numTokens: 48 };
        expect(errors).toEqual([["staging-save-incomplete", details]]);
      },
    );
  },
);

describe("blocks that cannot be staged", () => {
  test("a request that is admitted with fewer blocks than its tokens need is refused: the others would never be copied", async () => {
    await open();
    const request = produced("a", 40);
    const { scheduler } = pair.prefill;
    scheduler.matchedTokens(request, 0);
    expect(() => scheduler.afterAllocation(request, [[5, 6]], 0)).toThrow(
      "request a was admitted with 2 blocks of KV cache group 0, and its tokens need 3",
    );
    expect(scheduler.requestFinished(request, [[5, 6]], "error").keepBlocks).toBe(false);
    expect(scheduler.outstanding()["stagedBlocks"]).toBe(0);
  });

  test.each(["mamba", "circular"])("groups of kind %s are refused by name", async (kind) => {
    const groups = [
      { kind: "full", layerNames: ["layers.0"] },
      { kind, layerNames: ["layers.1"] },
    ];
    await expect(stagedPair({ connector: pullConnector, groups })).rejects.toThrow(
      `group 1 of the KV cache is "${kind}": its blocks do not stand for tokens of the prompt`,
    );
    await open();
  });
});

describe("a saved prompt", () => {
  test("is not saved again while readers fetch it", async () => {
    const saves: string[] = [];
    await open({ onCopied: (host, { requestId }) => void (host === "p" && saves.push(requestId)) });
    await prefill("a", 40, [[5, 6, 7]]);
    for (let round = 0; round < 5; round++) await step("prefill", round % 2 === 0 ? undefined : {});
    expect(saves).toEqual(["a"]);
    expect(pair.prefill.workers[0]?.outstanding()).toMatchObject({ saves: 0 });
    // Its pool blocks stay assigned.
    expect(pair.prefill.scheduler.outstanding()).toMatchObject({ stagedBlocks: 3 });
  });
});

describe("a copy that fails", () => {
  test("on the prefill side fails its request before a peer learns of the blocks", async () => {
    let broken = true;
    await open({
      beforeCopy: (host) => {
        if (broken && host === "p") throw new Error("bus error");
      },
    });
    const { end } = admitted("a", 32, [[1, 2]]);
    await expect(step("prefill")).rejects.toMatchObject({
      code: "KV_STAGING_FAILED",
      details: { requestIds: ["a"] },
    });
    broken = false;
    expect(end("error").keepBlocks).toBe(false);
    expect(pair.prefill.scheduler.outstanding()["stagedBlocks"]).toBe(0);
  });

  test("on the decode side fails its request with its device blocks, and releases the pool blocks", async () => {
    await open({
      beforeCopy: (host) => {
        if (host === "d") throw new Error("bus error");
      },
    });
    const params = await prefill("a", 32, [[1, 2]]);
    const request = asked("d", 32, params);
    const { scheduler } = pair.decode;
    scheduler.afterAllocation(request, [[30, 31]], scheduler.matchedTokens(request, 0).tokens);
    const { failed, failedBlockIds } = await until("decode", "d");
    expect(failed).toMatchObject({ code: "KV_STAGING_FAILED", blockIds: [30, 31] });
    expect(failedBlockIds).toEqual([30, 31]);
    expect(scheduler.outstanding()["stagedBlocks"]).toBe(0);
    // The next step of the decode side tells P that its last reader is done.
    await step("decode");
    await until("prefill", "a");
  });
});

describe("no KV transfer pending", () => {
  test.each([pullConnector, pushConnector])(
    "$name: a step does not wait, and calls neither the transport nor the device",
    async (connector) => {
      let calls = 0;
      const counted = <T extends object>(target: T): T =>
        new Proxy(target, {
          get(object, key) {
            const value: unknown = Reflect.get(object, key);
            if (typeof value !== "function") return value;
            return (...args: unknown[]) => {
              calls += 1;
              const result: unknown = value.apply(object, args);
              return key === "createAgent" ? (result as Promise<object>).then(counted) : result;
            };
          },
        });
      let copies = 0;
      await open({
        connector,
        wrapTransport: (transport: Transport) => counted(transport),
        beforeCopy: () => void copies++,
      });
      // The counters work: pools and agents were created, and memory was registered.
      expect(calls).toBeGreaterThan(0);
      calls = 0;
      for (const { scheduler, workers } of [pair.prefill, pair.decode]) {
        for (let round = 0; round < 1000; round++) {
          const metadata = scheduler.buildStepMetadata();
          expect(Object.keys(metadata)).not.toContain("staging");
          for (const worker of workers) {
            worker.startLoad(metadata);
            let waited = true;
            const saved = worker.waitForSave(metadata).then(() => {
              waited = false;
            });
            // It completes in microtasks, without timers or I/O.
            for (let turn = 0; turn < 5 && waited; turn++) await Promise.resolve();
            expect(waited).toBe(false);
            await saved;
            scheduler.applyWorkerOutput(worker.collectFinished());
          }
        }
      }
      expect({ calls, copies }).toEqual({ calls: 0, copies: 0 });
    },
  );
});
