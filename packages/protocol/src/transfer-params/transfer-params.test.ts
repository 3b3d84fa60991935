import { readdirSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import fc from "fast-check";
import { expect, test } from "vitest";
import { endsWell } from "../../test/damaged.js";
import {
  baseRequestId,
  checkRemotePrefillParams,
  encodeRemotePrefillParams,
  isCapability,
  newCapability,
  parseTransferParams,
} from "./transfer-params.js";

const folder = fileURLToPath(new URL("../../fixtures/wire/", import.meta.url));

const read = (name: string) => readFileSync(folder + name, "utf8");

/**
 * Each kv_transfer_params that vLLM's pull scheduler returned in the recordings, from the
 * scheduler's log and from HTTP responses.
 */
const recorded = [
  ...readdirSync(folder)
    .filter((name) => name.startsWith("pull") && name.endsWith(".sched.jsonl"))
    .flatMap((name) =>
      read(name)
        .split("\n")
        .filter(Boolean)
        .map((line) => JSON.parse(line)),
    )
    .filter(
      (line) => line.ev === "sched.request_finished.ret" && line.params?.do_remote_prefill === true,
    )
    .map((line) => line.params),
  ...readdirSync(folder)
    .filter((name) => /^http_.*pull.*\.json$/.test(name))
    .map((name) => JSON.parse(read(name)).prefill_response.kv_transfer_params),
] as Record<string, unknown>[];

const answer = recorded[0] ?? {};

test("vLLM's recorded parameters are parsed, and encoded again with the same keys in the same order", () => {
  expect(recorded.length).toBeGreaterThan(0);
  for (const params of recorded) {
    const parsed = parseTransferParams(params);
    if (parsed.kind !== "remote-prefill") throw new Error("not a remote prefill");
    expect(parsed.remoteRequestId).toBe(params["remote_request_id"]);
    const again = encodeRemotePrefillParams({
      ...parsed,
      remoteNumTokens: parsed.remoteNumTokens ?? 0,
      remoteBlocksExpiryTime: parsed.remoteBlocksExpiryTime ?? null,
    });
    const { remote_prefill_cached_tokens: fromTheServer, ...ofTheConnector } = params;
    const known = Object.fromEntries(Object.keys(ofTheConnector).map((key) => [key, again[key]]));
    // The text, so that the order of the keys counts as well.
    expect(JSON.stringify(known)).toBe(JSON.stringify(ofTheConnector));
    expect(parsed.given["remote_prefill_cached_tokens"]).toBe(fromTheServer);
  }
});

test("parses the parameters of a prefill request, and of a request without a transfer", () => {
  expect(
    parseTransferParams({
      do_remote_decode: true,
      do_remote_prefill: false,
      remote_engine_id: null,
    }).kind,
  ).toBe("remote-decode");
  expect(parseTransferParams(undefined).kind).toBe("local");
  expect(parseTransferParams({}).kind).toBe("local");
});

test.each([
  ["remote_block_ids", [[-1]]],
  ["remote_block_ids", [1, 2]],
  ["remote_block_ids", undefined],
  ["remote_port", 0],
  ["remote_host", ""],
  ["remote_host", "10.0.0.1;10.0.0.2"],
  ["remote_host", "*"],
  ["remote_host", "a/../b"],
  ["remote_engine_id", 5],
  ["remote_request_id", "x".repeat(10_000)],
  ["tp_size", 0],
  ["tp_size", 1.5],
  ["remote_blocks_expiry_time", "soon"],
  ["remote_block_ids", [[2 ** 60]]],
  ["do_remote_prefill", "yes"],
  ["do_remote_decode", true],
])("%s = %j is refused, and the error names the key", (key, value) => {
  const read = () => parseTransferParams({ ...answer, [key]: value });
  expect(read).toThrow(expect.objectContaining({ code: "KV_REQUEST_INVALID" }));
  expect(read).toThrow(key);
});

test.each([
  "127.0.0.1",
  "::1",
  "fe80::1%eth0",
  "p0.svc.cluster.local",
  "prefill_0",
  "::ffff:10.0.0.1",
])("%s is accepted as remote_host", (remote_host) => {
  expect(parseTransferParams({ ...answer, remote_host })).toMatchObject({
    remoteHost: remote_host,
  });
});

test("a missing or null key gets vLLM's default", () => {
  const { tp_size, dcp_size, pp_size, transfer_mode, remote_num_tokens, ...rest } = answer;
  expect(parseTransferParams({ ...rest, dcp_size: null })).toMatchObject({
    tpSize: 1,
    dcpSize: 1,
    ppSize: 1,
    transferMode: "pull",
    remoteNumTokens: undefined,
    remoteRegistrationGeneration: 0,
  });
});

test("baseRequestId removes vLLM's random suffix", () => {
  expect(baseRequestId("cmpl-abc-0-92dff6c0")).toBe("cmpl-abc-0");
  expect(baseRequestId("cmpl-abc-0-92DFF6C0")).toBe("cmpl-abc-0");
  expect(baseRequestId("cmpl-abc-92dff6c0-0")).toBe("cmpl-abc-92dff6c0-0");
  expect(baseRequestId("cmpl-abc")).toBe("cmpl-abc");
});

test("arbitrary parameters are parsed or refused with a KvError", () => {
  fc.assert(
    fc.property(
      fc.dictionary(
        fc.constantFrom(...Object.keys(answer), "other"),
        fc.anything({ withBigInt: true, withDate: true, withNullPrototype: true }),
      ),
      (params) => {
        endsWell(() => parseTransferParams({ ...answer, ...params }));
      },
    ),
  );
});

const pullAnswer = {
  do_remote_prefill: true,
  remote_block_ids: [[1, 2], []],
  remote_engine_id: "e",
  remote_request_id: "r",
  remote_host: "h",
  remote_port: 5600,
  remote_num_tokens: null,
  unknown_key: { x: 1 },
};
const { remote_block_ids: _, ...pushAnswer } = { ...pullAnswer, transfer_mode: "push", tp_size: 2 };

test("accepts what a vLLM D can use: vLLM's parameters, unknown keys, and no blocks in push", () => {
  const sized = { ...pullAnswer, transfer_mode: "pull", tp_size: 8, dcp_size: 1, pp_size: 1 };
  // The last one is another connector's own mode.
  const folder = { ...pullAnswer, transfer_mode: "folder" };
  for (const params of [...recorded, pullAnswer, sized, pushAnswer, folder])
    expect(checkRemotePrefillParams(params)).toBeUndefined();
});

test.each([
  [
    { remote_block_ids: undefined },
    "remote_block_ids is missing, not a list of block ids per KV cache group",
  ],
  [{ remote_block_ids: "../../etc" }, 'remote_block_ids is "../../etc", not a list'],
  [{ remote_block_ids: [1, 2] }, "remote_block_ids[0] is 1, not a list"],
  [{ remote_block_ids: [[1, -2]] }, "remote_block_ids[0] is -2, not a list of block ids"],
  [{ remote_block_ids: [[1.5]] }, "remote_block_ids[0] is 1.5"],
  [{ remote_block_ids: [[], []] }, "not a list with at least one block id"],
  [{ remote_engine_id: 5 }, "remote_engine_id is 5, not a non-empty string"],
  [{ remote_request_id: "" }, 'remote_request_id is "", not a non-empty string'],
  [{ remote_host: null }, "remote_host is null, not a string"],
  [{ remote_port: 1e9 }, "remote_port is 1000000000, not an integer from 1 to 65535"],
  [{ remote_port: "5600" }, 'remote_port is "5600"'],
  [{ tp_size: -3 }, "tp_size is -3"],
  [{ pp_size: null }, "pp_size is null, not a size"],
  [{ remote_num_tokens: "7" }, 'remote_num_tokens is "7"'],
  [{ transfer_mode: 7 }, "transfer_mode is 7, not a non-empty string"],
  [{ transfer_mode: "x".repeat(1000) }, "transfer_mode"],
  [{ transfer_mode: "folder", remote_port: 0 }, "remote_port is 0"],
  [{ transfer_mode: "push", remote_block_ids: undefined }, "tp_size is missing"],
])("refuses parameters with %j, which would make a vLLM D fail", (change, why) => {
  const error = checkRemotePrefillParams({ ...pullAnswer, ...change });
  expect(error?.code).toBe("KV_REQUEST_INVALID");
  expect(error?.message).toContain(why);
});

test("kv_peer decodes to what was encoded, and a malformed kv_peer counts as absent", () => {
  const lease = { incarnation: "i", generation: 3 };
  const parsed = parseTransferParams({ ...answer, kv_peer: lease });
  if (parsed.kind !== "remote-prefill") throw new Error("not a remote prefill");
  expect(parsed.lease).toEqual(lease);
  const again = encodeRemotePrefillParams({
    ...parsed,
    remoteNumTokens: parsed.remoteNumTokens ?? 0,
  });
  expect(again["kv_peer"]).toEqual(lease);
  for (const kv_peer of [
    null,
    "x",
    {},
    { incarnation: "", generation: 1 },
    { incarnation: "i", generation: 1.5 },
  ])
    expect(parseTransferParams({ ...answer, kv_peer })).toMatchObject({ lease: undefined });
});

test("no two capabilities are equal, and each has the form of one", () => {
  const capabilities = Array.from({ length: 2000 }, newCapability);
  expect(new Set(capabilities).size).toBe(2000);
  expect(capabilities.every(isCapability)).toBe(true);
});
