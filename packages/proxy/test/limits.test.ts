import { connect } from "node:net";
import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import { createProxy } from "../src/index.js";
import { decodeOk, prefillOk } from "./fake-upstream.js";
import { errorOf, post, runProxy, upstream } from "./set-up.js";

async function small() {
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const limits = { bodyLengthBytes: 1000, headersLengthBytes: 2048, prefillAnswerLengthBytes: 400 };
  return { p, ...(await runProxy({ prefillers: [p.url], decoders: [d.url], limits })) };
}

test("a body above the limit is a 413 in the usual form, and reaches nobody", async () => {
  const { url, p } = await small();
  expect((await post(`${url}/v1/completions`, { prompt: "a".repeat(900) })).status).toBe(200);
  const error = await errorOf(await post(`${url}/v1/completions`, { prompt: "a".repeat(1000) }));
  expect(error).toMatchObject({ status: 413, code: "KV_REQUEST_INVALID" });
  expect(p.seen).toHaveLength(1);
});

test("a client's connection is kept longer than clients and balancers keep theirs, or as long as is set", async () => {
  const { url } = await small();
  expect((await fetch(`${url}/health`)).headers.get("keep-alive")).toBe("timeout=75");
  const { url: other } = await runProxy({
    prefillers: ["127.0.0.1:1"],
    decoders: ["127.0.0.1:2"],
    timeouts: { keepAliveMs: 3_000 },
  });
  expect((await fetch(`${other}/health`)).headers.get("keep-alive")).toBe("timeout=3");
});

test("headers above the limit are a 431", async () => {
  const { url } = await small();
  const response = await post(
    `${url}/v1/completions`,
    { prompt: "a" },
    { headers: { "x-long": "a".repeat(3000) } },
  );
  expect(await errorOf(response)).toMatchObject({ status: 431, code: "KV_REQUEST_INVALID" });
});

test("what is not JSON, by type or by content, and what is not HTTP", async () => {
  const { url } = await small();
  const text = await post(`${url}/v1/completions`, "x", { headers: { "content-type": "text/plain" } });
  expect(await errorOf(text)).toMatchObject({ status: 415, code: "KV_REQUEST_INVALID" });
  expect(await errorOf(await post(`${url}/v1/completions`, "{"))).toMatchObject({ status: 400 });
  const noise = await new Promise<string>((resolve, reject) => {
    const socket = connect(Number(new URL(url).port), "127.0.0.1", () => socket.write("\0\0\r\n\r\n"));
    let answer = "";
    socket.setEncoding("utf8").on("data", (chunk: string) => (answer += chunk));
    socket.on("end", () => resolve(answer)).on("error", reject);
  });
  expect(noise).toMatch(/^HTTP\/1\.1 400 /);
  expect(noise).toContain("KV_REQUEST_INVALID");
});

test("a prefill answer above the limit is an error", async () => {
  const p = await upstream(({ response }) => void response.end(JSON.stringify({ text: "a".repeat(1000) })));
  const d = await upstream(decodeOk);
  const { url } = await runProxy({
    prefillers: [p.url],
    decoders: [d.url],
    limits: { prefillAnswerLengthBytes: 500 },
  });
  const error = await errorOf(await post(`${url}/v1/completions`, { prompt: "a" }));
  expect(error.message).toContain("more than 500 bytes");
});

test.each([
  [{ prefillers: [], decoders: ["d:1"] }, "KV_CONFIG_INVALID", "prefillers"],
  [{ prefillers: ["p:1", "http://p:1/"], decoders: ["d:1"] }, "KV_CONFIG_INVALID", "given twice"],
  [{ prefillers: ["p:1"], decoders: ["d:1"], timeouts: { prefillMs: -1 } }, "KV_CONFIG_INVALID", "prefillMs"],
  [
    { prefillers: ["p:1"], decoders: ["d:1"], limits: { bodyBytes: 1 } },
    "KV_CONFIG_UNKNOWN_KEY",
    "bodyBytes",
  ],
  [{ prefillers: ["p:1"], decoders: ["d:1"], prefilers: [] }, "KV_CONFIG_UNKNOWN_KEY", "prefilers"],
])("settings %j are refused with %s", (settings, code, message) => {
  let error: unknown;
  try {
    createProxy(settings as never);
  } catch (thrown) {
    error = thrown;
  }
  expect((error as KvError).message).toContain(message);
  expect(KvError.is(error, code as KvError["code"])).toBe(true);
});

test("a port that is taken is an error that names it", async () => {
  const { url } = await small();
  const port = Number(new URL(url).port);
  const second = createProxy({ prefillers: ["p:1"], decoders: ["d:1"] });
  await expect(second.listen({ port })).rejects.toThrow(`127.0.0.1:${port}`);
  await second.close();
});
