import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import { type Endpoint, readRequest } from "./request-body.js";

const read = (fields: unknown, endpoint: Endpoint = "/v1/completions") =>
  readRequest(endpoint, Buffer.from(JSON.stringify(fields)));

test.each([
  ["not JSON", Buffer.from("{"), "not JSON"],
  ["not UTF-8", Buffer.from([0x7b, 0x22, 0xff, 0x22, 0x7d]), "not JSON"],
  ["empty", Buffer.alloc(0), "not JSON"],
  ["an array", Buffer.from("[]"), "JSON object"],
  ["null", Buffer.from("null"), "JSON object"],
  ["parameters of its own", Buffer.from('{"kv_transfer_params":{"remote_host":"x"}}'), "set by the proxy"],
  ["no tokens", Buffer.from('{"max_tokens":0}'), "max_tokens is 0"],
  ["too many least tokens", Buffer.from('{"max_tokens":2,"min_tokens":3}'), "min_tokens is 3"],
])("a body that is %s is refused", (_what, body, message) => {
  let error: unknown;
  try {
    readRequest("/v1/completions", body);
  } catch (thrown) {
    error = thrown;
  }
  expect(KvError.is(error, "KV_REQUEST_INVALID")).toBe(true);
  expect((error as KvError).message).toContain(message);
});

test.each([
  [{ prompt: "a" }],
  [{ prompt: ["a"] }],
  [{ prompt: [1, 2, 3] }],
  [{ prompt: [[1, 2, 3]] }],
  [{ prompt: "a", n: 1, kv_transfer_params: null }],
  [{ prompt: "a", echo: true }],
  [{ prompt: "a", echo: true, max_tokens: 0 }],
  [{ prompt: "a", logprobs: 5 }],
])("%j can be parted", (fields) => {
  expect(read(fields).unsplittable).toBeUndefined();
});

test.each([
  [{ prompt: ["a", "b"] }, "2 prompts"],
  [{ prompt: [[1], [2], [3]] }, "3 prompts"],
  [{ prompt: "a", prompt_embeds: ["x"] }, "2 prompts"],
  [{ prompt: "a", n: 2 }, "n is 2"],
  [{ prompt: "a", n: "2" }, "n is 2"],
  [{ prompt: "a", best_of: 3 }, "best_of is 3"],
  [{ prompt: "a", use_beam_search: true }, "use_beam_search"],
  [{ prompt: "a", prompt_logprobs: 0 }, "prompt_logprobs"],
  [{ prompt: "a", echo: true, logprobs: 0 }, "echo"],
])("%j cannot be parted", (fields, why) => {
  expect(read(fields).unsplittable).toContain(why);
});

test("chat with echo asks for log probabilities of the prompt unless top_logprobs is null", () => {
  const chat = (fields: object) => read({ messages: [], echo: true, ...fields }, "/v1/chat/completions");
  expect(chat({}).unsplittable).toContain("echo");
  expect(chat({ top_logprobs: null }).unsplittable).toBeUndefined();
});
