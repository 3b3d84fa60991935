import { systemClock, systemRandom } from "@kv/interface";
import { expect, test } from "vitest";
import type { EngineServer } from "../server/server.js";
import { createBlockPool } from "./block-pool.js";
import type { HeadlessDecode } from "./headless-decode.js";
import { type PullOneOptions, pullOne } from "./pull-one.js";

const PARAMS = {
  do_remote_prefill: true,
  remote_block_ids: [[5, 6]],
  remote_engine_id: "e",
  remote_request_id: "r",
  remote_host: "h",
  remote_port: 1,
};
const BLOCK_BYTES = 256;

/** A decode side that says that it has read, and has written so many of its blocks. */
function claiming(written: number): PullOneOptions {
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
  } as unknown as HeadlessDecode;
  return {
    server: { prefill: async () => PARAMS } as unknown as EngineServer,
    decode,
    pool: createBlockPool(16),
    clock: systemClock(),
    beganMs: 0,
    blockLengthBytes: BLOCK_BYTES,
    logicalBlockKernels: 1,
    regions: 1,
    random: systemRandom(),
    keepSilent() {},
  };
}
const order = { requestId: "x", prompt: [1], promptTokens: 64, fault: undefined, abortAfterMs: 0 };

test("a read that wrote every block is one that is done, and its blocks are free again", async () => {
  const options = claiming(2);
  expect(await pullOne(order, options)).toMatchObject({ outcome: "ok", serverBlocks: 2, lengthBytes: 512 });
  expect(options.pool.free).toBe(15);
});

test("a read that is said to be done and left a block as it was has failed", async () => {
  const options = claiming(1);
  const { outcome, code, message } = await pullOne(order, options);
  expect({ outcome, code }).toEqual({ outcome: "failed", code: "KV_TRANSFER_FAILED" });
  expect(message).toContain("2 ends of blocks are as they were");
  expect(options.pool.free).toBe(15);
});
