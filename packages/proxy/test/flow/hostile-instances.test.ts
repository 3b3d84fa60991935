import {
  COMPLETION,
  prefillOk,
  STREAM,
  sendJson,
  sendStream,
} from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { errorOf, post, runProxy, upstream } from "../support/set-up.js";

async function start(answer: Parameters<typeof upstream>[0]) {
  const [p, d] = [await upstream(prefillOk), await upstream(answer)];
  return runProxy({ prefillers: [p.url], decoders: [d.url] });
}

const event = (index: number) => `data: {"choices":[{"index":${index},"text":"x"}]}\n\n`;

test("a stream where none was requested, and JSON where one was, are failures", async () => {
  const streams = await start(({ response }) => sendStream(response, STREAM));
  const json = await start(({ response }) => sendJson(response, COMPLETION));
  const asked = await post(`${streams.url}/v1/completions`, { prompt: "a" });
  expect(await errorOf(asked)).toMatchObject({ status: 502 });
  const other = await post(`${json.url}/v1/completions`, { prompt: "a", stream: true });
  expect(await errorOf(other)).toMatchObject({ status: 502 });
});

test.each([
  ["with another index in a stream", true, event(7) + STREAM],
  ["after the last event", true, STREAM + event(0)],
  ["with another index", false, '{"choices":[{"index":7,"text":"x"}]}'],
])("a choice %s fails the request", async (_what, stream, text) => {
  const { url, proxy } = await start(({ response }) => {
    if (stream) sendStream(response, text);
    else response.end(text);
  });
  const response = await post(`${url}/v1/completions`, { prompt: "a", stream });
  const read = response.text().catch(() => "cut off");
  if (response.status === 200) expect(await read).not.toContain('"index":7');
  await expect.poll(() => proxy.status().requests.failed).toEqual({ KV_PROXY_UPSTREAM_FAILED: 1 });
});

test("choices after the last event of a stream that is merged fail the request", async () => {
  const { url, proxy } = await start(({ response }) => sendStream(response, STREAM + event(0)));
  const asked = post(`${url}/v1/completions`, { prompt: ["a", "b"], stream: true });
  await asked.then((response) => response.text()).catch(() => {});
  await expect.poll(() => proxy.status().requests.failed).toEqual({ KV_PROXY_UPSTREAM_FAILED: 1 });
});

test("comments and blank lines after the last event pass", async () => {
  const text = `${STREAM}\n: bye\n\n`;
  const { url } = await start(({ response }) => sendStream(response, text));
  expect(await (await post(`${url}/v1/completions`, { prompt: "a", stream: true })).text()).toBe(
    text,
  );
});

test("a server failure of an instance passes without addresses", async () => {
  const message = "READ from 10.1.2.3:5600 failed, see http://p1.internal:8100/metrics";
  const { url } = await start(({ response }) => sendJson(response, { error: { message } }, 500));
  const response = await post(`${url}/v1/completions`, { prompt: "a" });
  expect(response.status).toBe(500);
  expect(await response.text()).not.toMatch(/10\.1\.2\.3|internal/);
});
