import { type Answer, KV_PARAMS_TEXT, sendStream } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { post, runPair, sends } from "../support/set-up.js";

const message = {
  id: "msg_1",
  type: "message",
  role: "assistant",
  content: [{ type: "text", text: "hello" }],
};
const event = (name: string, data: object) =>
  `event: ${name}\ndata: ${JSON.stringify({ type: name, ...data })}\n\n`;
/** As vLLM 0.33 streams a message. */
const STREAM =
  event("message_start", { message: { ...message, content: [] } }) +
  event("content_block_start", { index: 0, content_block: { type: "text", text: "" } }) +
  event("content_block_delta", {
    index: 0,
    delta: { type: "text_delta", text: 'an "error": hello' },
  }) +
  event("content_block_stop", { index: 0 }) +
  event("message_delta", { delta: { stop_reason: "end_turn" } }) +
  event("message_stop", {});
const failure = event("error", { error: { type: "api_error", message: "KV load failed" } });

const pair = (d: Answer) =>
  runPair({
    p: ({ response }) =>
      void response.end(
        `{"id":"msg_1","type":"message","content":[],"kv_transfer_params":${KV_PARAMS_TEXT}}`,
      ),
    d,
  });

const body = {
  model: "m",
  system: "be short",
  max_tokens: 50,
  n: 2,
  messages: [{ role: "user", content: "hi" }],
  tools: [{ name: "f", input_schema: { type: "object" } }],
};

test("/v1/messages passes through both legs: one token at prefill, the parameters at decode", async () => {
  const { p, d, url } = await pair(sends(200, message));
  const response = await post(`${url}/v1/messages`, body);
  expect([response.status, await response.json()]).toEqual([200, message]);
  expect(p.seen.map(({ path, json }) => [path, json])).toEqual([
    ["/v1/messages", expect.objectContaining({ ...body, n: 1, max_tokens: 1, stream: false })],
  ]);
  expect(d.seen.map(({ path, json }) => [path, json])).toEqual([
    ["/v1/messages", { ...body, kv_transfer_params: JSON.parse(KV_PARAMS_TEXT) }],
  ]);
});

test("a stream of messages that is cut off ends with an error event of its API", async () => {
  let cut = () => {};
  const { url } = await pair(({ response }) => {
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.write(STREAM.slice(0, STREAM.indexOf("event: message_stop")));
    cut = () => response.end();
  });
  const response = await post(`${url}/v1/messages`, { ...body, stream: true });
  let text = "";
  const reading = (async () => {
    for await (const chunk of response.body ?? []) {
      text += Buffer.from(chunk).toString();
      cut();
    }
  })();
  await expect(reading).rejects.toThrow();
  expect(text).toContain('event: error\ndata: {"type":"error","error":{"message":');
});

test("an error in the first event becomes an error answer; one in the middle passes and counts as failed", async () => {
  const first = await pair(({ response }) => sendStream(response, failure));
  const answered = await post(`${first.url}/v1/messages`, { ...body, stream: true });
  expect(answered.headers.get("content-type")).toBe("application/json");
  expect([answered.status, await answered.json()]).toMatchObject([
    500,
    { type: "error", error: { type: "api_error" } },
  ]);
  const later = await pair(({ response }) =>
    sendStream(response, `${STREAM.slice(0, 200)}\n\n${failure}`),
  );
  const response = await post(`${later.url}/v1/messages`, { ...body, stream: true });
  expect(await response.text()).toContain("KV load failed");
  await expect
    .poll(() => later.proxy.status().requests.failed)
    .toEqual({ KV_PROXY_UPSTREAM_FAILED: 1 });
});

const WRONG = { type: "invalid_request_error" };

test.each([
  ["a wrong limit", { max_tokens: 0 }, 400, WRONG],
  ["KV parameters", { kv_transfer_params: {} }, 400, WRONG],
  ["an answer without content", {}, 502, { type: "api_error", code: "KV_PROXY_UPSTREAM_FAILED" }],
])("the error for %s has the form of the Messages API", async (_what, more, status, error) => {
  const { url } = await pair(sends(200, { id: "msg_1" }));
  const response = await post(`${url}/v1/messages`, { ...body, ...more });
  expect([response.status, await response.json()]).toMatchObject([
    status,
    { type: "error", error },
  ]);
});
