import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import {
  decodeAgentMetadata,
  decodeHandshakePayload,
  decodeMsgpack,
  encodeAgentMetadata,
  encodeMsgpack,
} from "../index.js";

const frame = readFileSync(
  new URL("../../fixtures/wire/handshake/v33_pull_p1.pp0tp0.rep0.bin", import.meta.url),
);
const { agentMetadataBytes } = decodeHandshakePayload(frame);
const fields = decodeMsgpack(agentMetadataBytes, "metadata") as Record<string, unknown>;
const regions = (fields["block_lens"] as number[]).length;
const each = (value: unknown) => Array.from({ length: regions }, () => value);
const decodeWith = (changes: Record<string, unknown>) =>
  decodeAgentMetadata(encodeMsgpack({ ...fields, ...changes }));

test("null fields and unknown fields of a later vLLM are encoded again byte for byte", () => {
  const changes = {
    region_num_blocks: null,
    region_group_ids: null,
    region_names: null,
    region_mem_types: null,
    ple_block_len: 4096,
    region_members: [["a", "b"], []],
    packed_member_layouts: { "layers.0": [0, 128] },
    some_later_field: { nested: [1, "x", null, 1.5] },
  };
  const bytes = encodeMsgpack({ ...fields, ...changes });
  const metadata = decodeAgentMetadata(bytes);
  expect(metadata.regionNames).toBeUndefined();
  expect(metadata.rest).toEqual({ some_later_field: changes.some_later_field });
  expect(Buffer.from(encodeAgentMetadata(metadata)).toString("hex")).toBe(
    Buffer.from(bytes).toString("hex"),
  );
});

test("fields with a default may be missing", () => {
  const required = [
    "engine_id",
    "agent_metadata",
    "kv_caches_base_addr",
    "device_id",
    "num_blocks",
    "block_lens",
    "block_strides",
    "kv_cache_layout",
    "block_size",
    "ssm_sizes",
    "attn_backend_name",
    "physical_blocks_per_logical_kv_block",
  ];
  const bare = Object.fromEntries(required.map((name) => [name, fields[name]]));
  expect(decodeAgentMetadata(encodeMsgpack(bare))).toMatchObject({
    dcpSize: 1,
    pcpSize: 1,
    pleBlockLengthBytes: null,
    regionMembers: [],
    packedMemberLayouts: {},
  });
  for (const name of [
    "engine_id",
    "kv_caches_base_addr",
    "num_blocks",
    "kv_cache_layout",
    "attn_backend_name",
  ]) {
    const { [name]: _, ...lacking } = bare;
    expect(() => decodeAgentMetadata(encodeMsgpack(lacking))).toThrow(
      `agent metadata: ${name} is missing`,
    );
  }
});

test.each([
  ["engine_id", 5],
  ["agent_metadata", "text"],
  ["kv_caches_base_addr", []],
  ["kv_caches_base_addr", each(0)],
  ["kv_caches_base_addr", each(1.5)],
  ["kv_caches_base_addr", each("7f00")],
  ["device_id", -1],
  ["num_blocks", 0],
  ["block_lens", each(-1)],
  ["block_lens", [1]],
  ["block_strides", [1]],
  ["kv_cache_layout", "XYZ"],
  ["block_size", 0],
  ["ssm_sizes", [1, 2, 3]],
  ["attn_backend_name", null],
  ["physical_blocks_per_logical_kv_block", 0],
  ["region_num_blocks", [1]],
  ["region_group_ids", each(-2)],
  ["region_names", each(1)],
  ["region_mem_types", each("FILE")],
  ["dcp_size", 0],
  ["pcp_size", "1"],
  ["ple_block_len", -1],
  ["region_members", [[1]]],
  ["packed_member_layouts", { a: [1] }],
  ["packed_member_layouts", [1]],
  ["num_blocks", { toString: 1, valueOf: 1 }],
])("%s = %j is refused, and the error names the field", (name, value) => {
  const decode = () => decodeWith({ [name]: value });
  expect(decode).toThrow(expect.objectContaining({ code: "KV_WIRE_MALFORMED" }));
  expect(decode).toThrow(`agent metadata: ${name}`);
});

test.each([
  ["kv_caches_base_addr", Array.from({ length: 100_001 }, () => 4096)],
  ["engine_id", "x".repeat(5000)],
  ["region_names", each("x".repeat(5000))],
])("%s beyond its limit is refused, and the error names the field", (name, value) => {
  const decode = () => decodeWith({ [name]: value });
  expect(decode).toThrow(expect.objectContaining({ code: "KV_WIRE_LIMIT_EXCEEDED" }));
  expect(decode).toThrow(name);
});
