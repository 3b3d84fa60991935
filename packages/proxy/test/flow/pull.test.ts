import {
  type Answer,
  COMPLETION,
  decodeOk,
  KV_PARAMS_TEXT,
  prefillOk,
  sendJson,
} from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { post, runFleet, runPair, upstream } from "../support/set-up.js";

test.each(["/v1/completions", "/v1/chat/completions"])(
  "%s: the prefill leg, then the decode leg with its KV parameters",
  async (path) => {
    const { p, d, url, proxy } = await runPair();
    const body =
      '{"model":"m","prompt":"hi","messages":[],"max_tokens":7,"seed":9223372036854775807,"x":{"y":1.0}}';

    const response = await post(url + path, body, {
      headers: { authorization: "Bearer k", traceparent: "00-a-b-01" },
    });

    expect(response.status).toBe(200);
    expect(await response.json()).toEqual(COMPLETION);
    const [prefill, decode] = [await p.request(0), await d.request(0)];
    expect([prefill.path, decode.path]).toEqual([path, path]);
    expect(prefill.json).toMatchObject({ max_tokens: 1, stream: false });
    expect(prefill.json.kv_transfer_params).toEqual({
      do_remote_decode: true,
      do_remote_prefill: false,
      remote_engine_id: null,
      remote_block_ids: null,
      remote_host: null,
      remote_port: null,
    });
    expect(decode.body).toBe(`${body.slice(0, -1)},"kv_transfer_params":${KV_PARAMS_TEXT}}`);
    for (const { headers } of [prefill, decode]) {
      expect(headers).toMatchObject({ traceparent: "00-a-b-01" });
      expect(headers).not.toHaveProperty("authorization");
      expect(headers["x-request-id"]).toBe(response.headers.get("x-request-id"));
    }
    expect(proxy.status().requests).toMatchObject({
      in_flight: 0,
      total: 1,
      succeeded: 1,
      failed: {},
    });
  },
);

test("both legs and the answer carry the client's request id", async () => {
  const { ask, p, d } = await runPair();
  const response = await ask({}, { headers: { "x-request-id": "mine-1:2" } });
  const ids = [p, d].map(({ seen }) => seen[0]?.headers["x-request-id"]);
  expect(new Set([...ids, response.headers.get("x-request-id")])).toEqual(new Set(["mine-1:2"]));
  expect((await ask({}, { headers: { "x-request-id": "a,b" } })).status).toBe(400);
  expect(p.seen).toHaveLength(1);
});

test("a stream reaches the client byte for byte, each event as soon as it is whole", async () => {
  const pieces = ['data: {"choices":[{"text":"é"}]}\n\n', ": ping\n\n", "data: [DONE]\n\n"];
  const { p, d, ask } = await runPair({ d: () => {} });
  const asked = ask({ stream: true, stream_options: { include_usage: true } });
  const { response: decode, json } = await d.request(0);
  expect(json).toMatchObject({ stream: true, stream_options: { include_usage: true } });
  expect(p.seen[0]?.json).not.toHaveProperty("stream_options");
  decode.writeHead(200, { "content-type": "text/event-stream; charset=utf-8", "x-extra": "1" });

  let reader: ReadableStreamDefaultReader<Uint8Array> | undefined;
  for (const piece of pieces) {
    // The next piece is sent only after this one arrived, so the proxy must not hold it back.
    decode.write(piece.slice(0, 7));
    decode.write(piece.slice(7));
    if (reader === undefined) {
      const response = await asked;
      expect(response.headers.get("content-type")).toBe("text/event-stream; charset=utf-8");
      expect(response.headers.get("x-extra")).toBe("1");
      reader = response.body?.getReader();
    }
    let arrived = Buffer.alloc(0);
    while (arrived.length < Buffer.byteLength(piece))
      arrived = Buffer.concat([arrived, (await reader?.read())?.value ?? arrived]);
    expect(arrived.toString()).toBe(piece);
  }
  decode.end();
  expect((await reader?.read())?.done).toBe(true);
});

test("instances take turns, and concurrent requests each get their own answer", async () => {
  const echo: Answer = ({ json, response }) =>
    sendJson(response, { choices: [{ text: json.prompt }] });
  const { ask, p, d, proxy } = await runFleet([prefillOk, prefillOk, prefillOk], [echo, echo]);
  const prompts = Array.from({ length: 60 }, (_, at) => `prompt ${at}`);
  const answers = await Promise.all(
    prompts.map(async (prompt): Promise<unknown> => (await ask({ prompt })).json()),
  );
  expect(answers).toEqual(prompts.map((text) => ({ choices: [{ text }] })));
  expect([...p, ...d].map(({ seen }) => seen.length)).toEqual([20, 20, 20, 30, 30]);
  const status = proxy.status();
  expect(status.requests).toMatchObject({ in_flight: 0, total: 60, succeeded: 60 });
  expect([...status.prefillers, ...status.decoders].every((one) => one.in_flight === 0)).toBe(true);
});

test("/v1/models comes from a decode instance, whatever its base URL is", async () => {
  const d = await upstream(decodeOk);
  const { url } = await runPair({}, { decoders: [`${d.url}/v1`] });
  expect((await fetch(`${url}/v1/models?a=1`)).status).toBe(200);
  expect(d.seen[0]).toMatchObject({ method: "GET", path: "/v1/models?a=1" });
});
