import { expect, test } from "vitest";
import { kvParamsProblem } from "./kv-params.js";

const pull = {
  do_remote_prefill: true,
  remote_block_ids: [[1, 2], []],
  remote_engine_id: "e",
  remote_request_id: "r",
  remote_host: "h",
  remote_port: 5600,
  remote_num_tokens: null,
  unknown_member: { x: 1 },
};
const { remote_block_ids: _, ...push } = { ...pull, transfer_mode: "push", tp_size: 2 };

test("accepts what vLLM answers, with unknown members, and for push without blocks", () => {
  expect(kvParamsProblem(pull)).toBeUndefined();
  expect(
    kvParamsProblem({ ...pull, transfer_mode: "pull", tp_size: 8, dcp_size: 1, pp_size: 1 }),
  ).toBeUndefined();
  expect(kvParamsProblem(push)).toBeUndefined();
});

test.each([
  [{ remote_block_ids: undefined }, "remote_block_ids is not a list (missing)"],
  [{ remote_block_ids: "../../etc" }, 'remote_block_ids is not a list ("../../etc")'],
  [{ remote_block_ids: [1, 2] }, "one list for each KV cache group"],
  [{ remote_block_ids: [[1, -2]] }, "not a block id (-2)"],
  [{ remote_block_ids: [[1.5]] }, "not a block id (1.5)"],
  [{ remote_block_ids: [[], []] }, "contains no block id"],
  [{ remote_engine_id: 5 }, "remote_engine_id is not a non-empty string (5)"],
  [{ remote_request_id: "" }, "remote_request_id is not a non-empty string"],
  [{ remote_host: null }, "remote_host is not a non-empty string (null)"],
  [{ remote_port: 1e9 }, "remote_port is not a port (1000000000)"],
  [{ remote_port: "5600" }, "remote_port is not a port"],
  [{ tp_size: -3 }, "tp_size is not a positive integer (-3)"],
  [{ pp_size: null }, "pp_size is not a positive integer (null)"],
  [{ remote_num_tokens: "7" }, "remote_num_tokens is not a token count"],
  [{ transfer_mode: 7 }, "transfer_mode is neither"],
])("refuses %j", (change, problem) => {
  expect(kvParamsProblem({ ...pull, ...change })).toContain(problem);
});

test("requires tp_size of a worker that pushes", () => {
  expect(kvParamsProblem({ ...push, tp_size: undefined })).toContain(
    "tp_size is not a positive integer (missing)",
  );
});
