import { expect, test } from "vitest";
import { readKvObject } from "./kv-object.js";

/** What vLLM 0.33 has answered, with fewer blocks. */
const FIELDS = {
  do_remote_prefill: false,
  do_remote_decode: true,
  remote_block_ids: [[1, 2, 3]],
  remote_engine_id: "engine",
  remote_request_id: "cmpl-1-0-ab",
  remote_host: "127.0.0.1",
  remote_port: 5601,
  tp_size: 1,
  dcp_size: 1,
  pp_size: 1,
  remote_num_tokens: 299,
  remote_blocks_expiry_time: 4960.27,
  remote_registration_generation: 1,
  transfer_mode: "pull",
};

test("an object of a D is read, and stays as it was written", () => {
  const params = JSON.stringify(FIELDS, null, 1);
  expect(readKvObject(params)).toEqual({
    params,
    engineId: "engine",
    requestId: "cmpl-1-0-ab",
    generation: 1,
    tokens: 299,
    blocks: [1, 2, 3],
    tpSize: 1,
    dcpSize: 1,
    isKv: false,
  });
  const lease = { incarnation: "i", generation: 1, capability: "AAAAAAAAAAAAAAAAAAAAAA" };
  expect(readKvObject(JSON.stringify({ ...FIELDS, kv_peer: lease }))).toMatchObject({ isKv: true });
  const parallel = JSON.stringify({ ...FIELDS, kv_peer: lease, dcp_size: 2 });
  expect(readKvObject(parallel)).toMatchObject({ dcpSize: 2, isKv: true });
});

test.each(["null", "{}", JSON.stringify({ ...FIELDS, do_remote_decode: false })])(
  "nothing is to be read where D holds nothing: %s",
  (params) => expect(readKvObject(params)).toBeUndefined(),
);

test.each([
  ["remote_num_tokens", null, "remote_num_tokens is null"],
  ["remote_num_tokens", 0, "remote_num_tokens is 0"],
  ["remote_num_tokens", "299", "remote_num_tokens"],
  ["remote_blocks_expiry_time", null, "remote_blocks_expiry_time"],
  ["remote_block_ids", [[1], [2]], "2 groups"],
  ["remote_block_ids", [[1, 1]], "twice"],
  ["remote_block_ids", [[]], "at least one block"],
  ["remote_block_ids", [[-1]], "remote_block_ids"],
  ["remote_engine_id", 7, "remote_engine_id"],
  ["remote_host", "a;b", "remote_host"],
  ["remote_port", 0, "remote_port"],
  ["pp_size", 2, "pp_size is 2"],
  ["dcp_size", 2, "dcp_size is 2"],
  ["transfer_mode", "push", "transfer_mode"],
])("an object with %s %j is refused", (name, value, text) => {
  expect(() => readKvObject(JSON.stringify({ ...FIELDS, [name]: value }))).toThrow(text);
});
