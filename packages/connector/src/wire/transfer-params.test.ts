import { readdirSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { KvError } from "@kv/interface";
import fc from "fast-check";
import { expect, test } from "vitest";
import { baseRequestId, encodeRemotePrefillParams, parseTransferParams } from "./transfer-params.js";

const folder = fileURLToPath(new URL("../../fixtures/wire/", import.meta.url));

const read = (name: string) => readFileSync(folder + name, "utf8");

/** Every kv_transfer_params that vLLM's pull scheduler returned in the recordings, as the scheduler gave them and as HTTP carried them. */
const recorded = [
  ...readdirSync(folder)
    .filter((name) => name.startsWith("pull") && name.endsWith(".sched.jsonl"))
    .flatMap((name) =>
      read(name)
        .split("\n")
        .filter(Boolean)
        .map((line) => JSON.parse(line)),
    )
    .filter((line) => line.ev === "sched.request_finished.ret" && line.params?.do_remote_prefill === true)
    .map((line) => line.params),
  ...readdirSync(folder)
    .filter((name) => /^http_.*pull.*\.json$/.test(name))
    .map((name) => JSON.parse(read(name)).prefill_response.kv_transfer_params),
] as Record<string, unknown>[];

const answer = recorded[0] ?? {};

test("vLLM's own answers are read, and written again key by key", () => {
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

test("a request for a decode side elsewhere, and one for neither", () => {
  expect(
    parseTransferParams({ do_remote_decode: true, do_remote_prefill: false, remote_engine_id: null }).kind,
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
])("%s = %j is refused by name", (key, value) => {
  const read = () => parseTransferParams({ ...answer, [key]: value });
  expect(read).toThrow(expect.objectContaining({ code: "KV_REQUEST_INVALID" }));
  expect(read).toThrow(key);
});

test.each(["127.0.0.1", "::1", "fe80::1%eth0", "p0.svc.cluster.local", "prefill_0", "::ffff:10.0.0.1"])(
  "%s is a host",
  (remote_host) => {
    expect(parseTransferParams({ ...answer, remote_host })).toMatchObject({ remoteHost: remote_host });
  },
);

test("what a peer leaves out or says null has vLLM's default", () => {
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

test("the base of a request id is without vLLM's suffix", () => {
  expect(baseRequestId("cmpl-abc-0-92dff6c0")).toBe("cmpl-abc-0");
  expect(baseRequestId("cmpl-abc-0-92DFF6C0")).toBe("cmpl-abc-0");
  expect(baseRequestId("cmpl-abc-92dff6c0-0")).toBe("cmpl-abc-92dff6c0-0");
  expect(baseRequestId("cmpl-abc")).toBe("cmpl-abc");
});

test("whatever a client sends, it is read or refused with a KvError", () => {
  fc.assert(
    fc.property(
      fc.dictionary(
        fc.constantFrom(...Object.keys(answer), "other"),
        fc.anything({ withBigInt: true, withDate: true, withNullPrototype: true }),
      ),
      (params) => {
        try {
          parseTransferParams({ ...answer, ...params });
        } catch (error) {
          if (!KvError.is(error)) throw error;
        }
      },
    ),
  );
});
