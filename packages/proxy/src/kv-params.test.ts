import { expect, test } from "vitest";
import { whyUnusable } from "./kv-params.js";

const pull = {
  do_remote_prefill: true,
  remote_block_ids: [[1, 2], []],
  remote_engine_id: "e",
  remote_request_id: "r",
  remote_host: "h",
  remote_port: 5600,
  remote_num_tokens: null,
  kv_of_tomorrow: { x: 1 },
};
const { remote_block_ids: _, ...push } = { ...pull, transfer_mode: "push", tp_size: 2 };

test("what vLLM answers is usable, with fields that nobody knows, and in push without blocks", () => {
  expect(whyUnusable(pull)).toBeUndefined();
  expect(
    whyUnusable({ ...pull, transfer_mode: "pull", tp_size: 8, dcp_size: 1, pp_size: 1 }),
  ).toBeUndefined();
  expect(whyUnusable(push)).toBeUndefined();
});

test.each([
  [{ remote_block_ids: undefined }, "remote_block_ids is no list (missing)"],
  [{ remote_block_ids: "../../etc" }, 'remote_block_ids is no list ("../../etc")'],
  [{ remote_block_ids: [1, 2] }, "one list for each KV cache group"],
  [{ remote_block_ids: [[1, -2]] }, "no block id (-2)"],
  [{ remote_block_ids: [[1.5]] }, "no block id (1.5)"],
  [{ remote_block_ids: [[], []] }, "names no block"],
  [{ remote_engine_id: 5 }, "remote_engine_id is no text (5)"],
  [{ remote_request_id: "" }, "remote_request_id is no text"],
  [{ remote_host: null }, "remote_host is no text (null)"],
  [{ remote_port: 1e9 }, "remote_port is no port (1000000000)"],
  [{ remote_port: "5600" }, "remote_port is no port"],
  [{ tp_size: -3 }, "tp_size is no size (-3)"],
  [{ pp_size: null }, "pp_size is no size (null)"],
  [{ remote_num_tokens: "7" }, "remote_num_tokens is no count"],
  [{ transfer_mode: 7 }, "transfer_mode is neither"],
])("%j is not", (change, why) => {
  expect(whyUnusable({ ...pull, ...change })).toContain(why);
});

test("a worker that pushes has to say its size", () => {
  expect(whyUnusable({ ...push, tp_size: undefined })).toContain("tp_size is no size (missing)");
});
