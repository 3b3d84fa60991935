import { systemClock, systemRandom } from "@kv/interface";
import { expect, test } from "vitest";
import { BlockPool } from "../headless/block-pool.js";
import type { MatchingDecode } from "../headless/matching-decode.js";
import type { EngineServer } from "../http/engine-server.js";
import { PromptRunner } from "./load.js";

const PARAMS = {
  do_remote_prefill: true,
  remote_block_ids: [[5, 6]],
  remote_engine_id: "e",
  remote_request_id: "r",
  remote_host: "h",
  remote_port: 1,
};
const BLOCK_BYTES = 256;

/**
 * A runner whose decode engine reports every read as complete but writes only the first `written`
 * blocks.
 */
function runnerWriting(
  written: number,
  pool: BlockPool,
  { signal, prefill = async () => PARAMS }: { signal?: AbortSignal; prefill?: () => unknown } = {},
): PromptRunner {
  const memory = new Uint8Array(16 * BLOCK_BYTES);
  const block = (_rank: number, _region: number, id: number) =>
    memory.subarray(id * BLOCK_BYTES, (id + 1) * BLOCK_BYTES);
  const decode = {
    tpSize: 1,
    block,
    finish() {},
    async receive(_request: unknown, [ids = []]: number[][]) {
      for (const id of ids.slice(0, written)) block(0, 0, id).fill(1);
      return { failure: undefined, aborted: false };
    },
  };
  return new PromptRunner({
    signal,
    server: { prefill } as unknown as EngineServer,
    matching: {
      decode,
      metadata: { physicalBlocksPerLogical: 1 },
      settings: { regions: [{ blockLengthBytes: BLOCK_BYTES }] },
    } as unknown as MatchingDecode,
    pool,
    filter: { drop() {} },
    clock: systemClock(),
    random: systemRandom(),
    loadStartMs: 0,
  });
}
const order = { requestId: "x", prompt: [1], promptTokens: 64, fault: undefined, abortAfterMs: 0 };

test("a read that writes every block succeeds and returns its blocks to the pool", async () => {
  const pool = new BlockPool(16);
  const result = await runnerWriting(2, pool).run(order);
  expect(result).toMatchObject({ outcome: "ok", serverBlocks: 2, lengthBytes: 512 });
  expect(pool.free).toBe(15);
});

test("a completed read that leaves a block unwritten fails", async () => {
  const pool = new BlockPool(16);
  const { outcome, code, message } = await runnerWriting(1, pool).run(order);
  expect({ outcome, code }).toEqual({ outcome: "failed", code: "KV_TRANSFER_FAILED" });
  expect(message).toContain("2 block edges were not written");
  expect(pool.free).toBe(15);
});

test("first-contact.md 2: a request that Ctrl-C ends is aborted, and no failure of the server", async () => {
  const stop = new AbortController();
  const runner = runnerWriting(2, new BlockPool(16), {
    signal: stop.signal,
    prefill: () => {
      stop.abort();
      return Promise.reject(stop.signal.reason);
    },
  });
  expect(await runner.run(order)).toMatchObject({ outcome: "aborted", code: undefined });
  const other = runnerWriting(2, new BlockPool(16), {
    signal: stop.signal,
    prefill: () => Promise.reject(new Error("the server is gone")),
  });
  expect(await other.run(order)).toMatchObject({ outcome: "failed" });
});
