import { systemClock, YieldingQueue } from "@kv/interface";
import { expect, test } from "vitest";
import {
  bodyLength,
  bodyOf,
  parseGenerationRequest,
  parseRequestInSteps,
} from "./generation-request.js";
import type { Endpoint } from "./routes.js";

const read = (fields: unknown, endpoint: Endpoint = "/v1/completions") =>
  parseGenerationRequest(endpoint, Buffer.from(JSON.stringify(fields)));

test.each([
  ["not JSON", Buffer.from("{"), "not JSON"],
  ["not UTF-8", Buffer.from([0x7b, 0x22, 0xff, 0x22, 0x7d]), "not JSON"],
  ["empty", Buffer.alloc(0), "not JSON"],
  ["an array", Buffer.from("[]"), "JSON object"],
  ["null", Buffer.from("null"), "JSON object"],
  ["parameters of its own", Buffer.from('{"kv_transfer_params":{}}'), "the proxy sets it"],
  ["no tokens", Buffer.from('{"max_tokens":0}'), "max_tokens is 0"],
  ["a limit that is no whole number", Buffer.from('{"max_tokens":"5"}'), 'max_tokens is "5"'],
  ["a flag that is none", Buffer.from('{"echo":1}'), "echo is 1"],
  ["no copies", Buffer.from('{"n":0}'), "n is 0"],
  [
    "stream options without a stream",
    Buffer.from('{"stream_options":{"include_usage":true}}'),
    "stream: true",
  ],
  [
    "a stream with prompt_logprobs",
    Buffer.from('{"stream":true,"prompt_logprobs":1}'),
    "prompt_logprobs",
  ],
  ["too many least tokens", Buffer.from('{"max_tokens":2,"min_tokens":3}'), "min_tokens is 3"],
])("refuses a body that is %s", (_what, body, message) => {
  expect(() => parseGenerationRequest("/v1/completions", body)).toThrow(
    expect.objectContaining({
      code: "KV_REQUEST_INVALID",
      message: expect.stringContaining(message) as string,
    }) as Error,
  );
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

test.each<[Endpoint, object, boolean]>([
  ["/v1/completions", { prompt_logprobs: 0 }, true],
  ["/v1/completions", { echo: true, logprobs: 0 }, true],
  ["/v1/completions", { echo: true, max_tokens: 0 }, true],
  ["/v1/completions", { echo: true }, false],
  ["/v1/completions", { logprobs: 2 }, false],
  ["/v1/chat/completions", { prompt_logprobs: 1 }, true],
  ["/v1/chat/completions", { echo: true }, true],
  ["/v1/chat/completions", { echo: true, top_logprobs: null }, false],
  ["/v1/responses", { prompt_logprobs: 1 }, false],
])("whether %s with %j asks about its prompt: %s", (endpoint, fields, is) => {
  expect(read({ prompt: "a", ...fields }, endpoint).asksAboutPrompt).toBe(is);
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

test("a long body is parsed in several turns; its long members are sent as they were written", async () => {
  const ids = Array.from({ length: 200_000 }, (_, at) => at);
  const text = `{"seed":9007199254740993,"prompt":[${ids.join(", ")}],"max_tokens":5}`;
  const queue = new YieldingQueue({ clock: systemClock() });
  let others = 0;
  let ended = false;
  const other = () => {
    others += 1;
    if (!ended) queue.push(other);
  };
  queue.push(other);
  const request = await parseRequestInSteps("/v1/completions", Buffer.from(text), queue);
  ended = true;
  expect(others).toBeGreaterThan(text.length / 300_000);
  expect(request.fields).toEqual({ ...JSON.parse(text), prompt: Int32Array.from(ids) });
  expect(request.text).toBe('{"seed":9007199254740993,"max_tokens":5}');
  expect(request.long.map(({ key }) => key)).toEqual(["prompt"]);
  expect(bodyLength(request)).toBeGreaterThan(0.99 * text.length);
  const body = bodyOf(request) as Uint8Array[];
  expect(Buffer.concat(body).toString()).toBe(
    `{"seed":9007199254740993,"max_tokens":5,"prompt":[${ids.join(", ")}]}`,
  );
});

test("refuses a long body that is not JSON", async () => {
  const body = Buffer.from(`{"prompt":"${"a".repeat(300_000)}",{}`);
  await expect(
    parseRequestInSteps("/v1/completions", body, new YieldingQueue({ clock: systemClock() })),
  ).rejects.toMatchObject({ code: "KV_REQUEST_INVALID", message: "the body is not JSON" });
});
