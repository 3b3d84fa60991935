import { type Answer, KV_PARAMS_TEXT, sendJson, sendStream } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { post, runProxy, upstream } from "../support/set-up.js";

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

async function pair(decode: Answer) {
  const p = await upstream(({ response }) => {
    response.writeHead(200, { "content-type": "application/json" });
    response.end(
      `{"id":"msg_1","type":"message","content":[],"kv_transfer_params":${KV_PARAMS_TEXT}}`,
    );
  });
  const d = await upstream(decode);
  return { p, d, ...(await runProxy({ prefillers: [p.url], decoders: [d.url] })) };
}

const body = {
  model: "m",
  system: "be short",
  max_tokens: 50,
  n: 2,
  messages: [{ role: "user", content: "hi" }],
  tools: [{ name: "f", input_schema: { type: "object" } }],
};

test("/v1/messages passes through both legs: one token at prefill, the parameters at decode", async () => {
  const { p, d, url } = await pair(({ response }) => sendJson(response, message));
  const response = await post(`${url}/v1/messages`, body);
  expect([response.status, await response.json()]).toEqual([200, message]);
  expect(p.seen.map(({ path, json }) => [path, json])).toEqual([
    ["/v1/messages", expect.objectContaining({ ...body, n: 1, max_tokens: 1, stream: false })],
  ]);
  expect(d.seen.map(({ path, json }) => [path, json])).toEqual([
    ["/v1/messages", { ...body, kv_transfer_params: JSON.parse(KV_PARAMS_TEXT) }],
  ]);
});

test("/v1/messages is streamed byte for byte, and complete with message_stop", async () => {
  const { proxy, url } = await pair(({ response }) => sendStream(response, STREAM));
  const response = await post(`${url}/v1/messages`, { ...body, stream: true });
  expect(await response.text()).toBe(STREAM);
  await expect.poll(() => proxy.status().requests).toMatchObject({ succeeded: 1, failed: {} });
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

test.each([
  [{ ...body, max_tokens: 0 }, 400, "invalid_request_error"],
  [{ ...body, kv_transfer_params: {} }, 400, "invalid_request_error"],
])("the proxy's own errors have the form of the Messages API", async (wrong, status, type) => {
  const { url } = await pair(({ response }) => sendJson(response, message));
  const response = await post(`${url}/v1/messages`, wrong);
  expect([response.status, await response.json()]).toMatchObject([
    status,
    { type: "error", error: { type } },
  ]);
});

test("an answer without content is no message", async () => {
  const { url } = await pair(({ response }) => sendJson(response, { id: "msg_1" }));
  const response = await post(`${url}/v1/messages`, body);
  expect([response.status, await response.json()]).toMatchObject([
    502,
    { type: "error", error: { type: "api_error", code: "KV_PROXY_UPSTREAM_FAILED" } },
  ]);
});
