import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import { type Endpoint, parseGenerationRequest } from "./generation-request.js";

const read = (fields: unknown, endpoint: Endpoint = "/v1/completions") =>
  parseGenerationRequest(endpoint, Buffer.from(JSON.stringify(fields)));

test.each([
  ["not JSON", Buffer.from("{"), "not JSON"],
  ["not UTF-8", Buffer.from([0x7b, 0x22, 0xff, 0x22, 0x7d]), "not JSON"],
  ["empty", Buffer.alloc(0), "not JSON"],
  ["an array", Buffer.from("[]"), "JSON object"],
  ["null", Buffer.from("null"), "JSON object"],
  ["parameters of its own", Buffer.from('{"kv_transfer_params":{"remote_host":"x"}}'), "the proxy sets it"],
  ["no tokens", Buffer.from('{"max_tokens":0}'), "max_tokens is 0"],
  ["a limit that is no whole number", Buffer.from('{"max_tokens":"5"}'), 'max_tokens is "5"'],
  ["a flag that is none", Buffer.from('{"echo":1}'), "echo is 1"],
  ["no copies", Buffer.from('{"n":0}'), "n is 0"],
  [
    "stream options without a stream",
    Buffer.from('{"stream_options":{"include_usage":true}}'),
    "stream: true",
  ],
  ["a stream with prompt_logprobs", Buffer.from('{"stream":true,"prompt_logprobs":1}'), "prompt_logprobs"],
  ["too many least tokens", Buffer.from('{"max_tokens":2,"min_tokens":3}'), "min_tokens is 3"],
])("refuses a body that is %s", (_what, body, message) => {
  let error: unknown;
  try {
    parseGenerationRequest("/v1/completions", body);
  } catch (thrown) {
    error = thrown;
  }
  expect(KvError.is(error, "KV_REQUEST_INVALID")).toBe(true);
  expect((error as KvError).message).toContain(message);
});

test.each([
  [{ prompt: "a" }],
  [{ prompt: ["a", "b"], n: 2 }],
  [{ prompt: [[1, 2, 3]] }],
  [{ prompt: "a", n: 1, kv_transfer_params: null }],
  [{ prompt: "a", echo: true, logprobs: 0 }],
  [{ prompt: "a", echo: true, max_tokens: 0 }],
  [{ prompt: "a", prompt_logprobs: 3 }],
])("%j can be split", (fields) => {
  expect(read(fields).disaggregationLimit).toBeUndefined();
});

test.each([
  [{ prompt: "a", prompt_embeds: ["x"] }, "prompt_embeds"],
  [{ prompt: "a", best_of: 3 }, "best_of is 3"],
  [{ prompt: "a", use_beam_search: true }, "use_beam_search"],
])("%j cannot be split into prefill and decode", (fields, why) => {
  expect(read(fields).disaggregationLimit).toContain(why);
});

test("a chat with echo and logprobs cannot be split", () => {
  const chat = (fields: object) => read({ messages: [], echo: true, ...fields }, "/v1/chat/completions");
  expect(chat({ logprobs: true }).disaggregationLimit).toContain("echo");
  expect(chat({}).disaggregationLimit).toBeUndefined();
});

test.each([
  [{ previous_response_id: "r" }, "previous_response_id"],
  [{ background: true }, "background"],
  [{ tools: [{ type: "function" }, { type: "mcp" }] }, '"mcp"'],
])("a response with %j cannot be split", (fields, why) => {
  expect(read({ input: "a", ...fields }, "/v1/responses").disaggregationLimit).toContain(why);
  expect(
    read({ input: "a", tools: [{ type: "function" }] }, "/v1/responses").disaggregationLimit,
  ).toBeUndefined();
});
