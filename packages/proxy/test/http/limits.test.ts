import { once } from "node:events";
import { connect } from "node:net";
import { KvError, silentLog } from "@kv/interface";
import { decodeOk, prefillOk } from "@kv/testing/http/fake-upstream";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import { createProxy } from "../../src/index.js";
import { errorOf, post, runPair, runProxy, upstream } from "../support/set-up.js";

/** A client that sends an incomplete request. */
async function startSending(url: string, head: string) {
  const socket = connect(Number(new URL(url).port), "127.0.0.1");
  await once(socket, "connect");
  socket.write(
    `POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n${head}\r\n\r\n{`,
  );
  let answer = "";
  socket.setEncoding("utf8").on("data", (chunk: string) => (answer += chunk));
  return { socket, answer: () => answer };
}

async function small() {
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const limits = { bodyLengthBytes: 1000, headersLengthBytes: 2048, prefillAnswerLengthBytes: 400 };
  return { p, ...(await runProxy({ prefillers: [p.url], decoders: [d.url], limits })) };
}

test("a body above the limit is a 413 in OpenAI's form, and reaches no instance", async () => {
  const { url, p } = await small();
  expect((await post(`${url}/v1/completions`, { prompt: "a".repeat(900) })).status).toBe(200);
  const error = await errorOf(await post(`${url}/v1/completions`, { prompt: "a".repeat(1000) }));
  expect(error).toMatchObject({ status: 413, code: "KV_REQUEST_INVALID" });
  expect(p.seen).toHaveLength(1);
});

test("a client that is still sending a body above the limit gets the 413 and no reset", async () => {
  const { url } = await small();
  const lengthBytes = 32 * 1024 * 1024;
  const { socket, answer } = await startSending(url, `content-length: ${lengthBytes}`);
  await expect.poll(answer).toMatch(/^HTTP\/1\.1 413 .*larger than 1000 bytes/s);
  const closed = once(socket, "close");
  const chunk = Buffer.alloc(1024 * 1024, "a");
  for (let sent = 1; sent < lengthBytes; sent += chunk.length) {
    const rest = chunk.subarray(0, Math.min(chunk.length, lengthBytes - sent));
    if (!socket.write(rest)) await once(socket, "drain");
  }
  expect(await closed).toEqual([false]);
});

test("the rest of a refused body is read for a limited time", async () => {
  const clock = manualClock();
  const { url } = await runProxy({
    prefillers: ["p:1"],
    decoders: ["d:1"],
    limits: { bodyLengthBytes: 1 },
    clock,
  });
  const { socket, answer } = await startSending(url, "content-length: 100");
  await expect.poll(answer).toContain(" 413 ");
  expect(socket.readyState).toBe("open");
  const ended = once(socket, "end");
  clock.advance(30_000);
  await ended;
});

test("a client that does not send its request in time gets a 408", async () => {
  const timeouts = { receiveMs: 100 };
  const { url } = await runProxy({ prefillers: ["p:1"], decoders: ["d:1"], timeouts });
  const { socket, answer } = await startSending(url, "content-length: 100");
  await once(socket, "end");
  expect(answer()).toMatch(/^HTTP\/1\.1 408 .*took too long to arrive/s);
});

test("an incomplete request does not keep the proxy from closing", async () => {
  const { url, proxy } = await runProxy({ prefillers: ["p:1"], decoders: ["d:1"] });
  const { socket } = await startSending(url, "content-length: 100");
  const gone = once(socket, "close");
  // The second connection got an answer, so the server has the first one too.
  await fetch(`${url}/health`);
  await proxy.close({ graceMs: 1 });
  await gone;
});

test("idle connections are kept for 75 s, or for the time in the settings", async () => {
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

test("refuses bodies that are not JSON, by type or content, and input that is not HTTP", async () => {
  const { url } = await small();
  const text = await post(`${url}/v1/completions`, "x", {
    headers: { "content-type": "text/plain" },
  });
  expect(await errorOf(text)).toMatchObject({ status: 415, code: "KV_REQUEST_INVALID" });
  expect(await errorOf(await post(`${url}/v1/completions`, "{"))).toMatchObject({ status: 400 });
  const noise = await new Promise<string>((resolve, reject) => {
    const socket = connect(Number(new URL(url).port), "127.0.0.1", () =>
      socket.write("\0\0\r\n\r\n"),
    );
    let answer = "";
    socket.setEncoding("utf8").on("data", (chunk: string) => (answer += chunk));
    socket.on("end", () => resolve(answer)).on("error", reject);
  });
  expect(noise).toMatch(/^HTTP\/1\.1 400 /);
  expect(noise).toContain("KV_REQUEST_INVALID");
});

test("a prefill answer above the limit is an error", async () => {
  const { url } = await runPair(
    { p: ({ response }) => void response.end(JSON.stringify({ text: "a".repeat(1000) })) },
    { limits: { prefillAnswerLengthBytes: 500 } },
  );
  const error = await errorOf(await post(`${url}/v1/completions`, { prompt: "a" }));
  expect(error.message).toContain("more than 500 bytes");
});

test.each([
  [{ prefillers: [], decoders: ["d:1"] }, "KV_CONFIG_INVALID", "prefillers"],
  [{ prefillers: ["p:1", "http://p:1/"], decoders: ["d:1"] }, "KV_CONFIG_INVALID", "given twice"],
  [
    { prefillers: ["p:1"], decoders: ["d:1"], timeouts: { prefillMs: -1 } },
    "KV_CONFIG_INVALID",
    "prefillMs",
  ],
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

test("settings without effect are logged", () => {
  const warned: unknown[] = [];
  const warn = (event: string, fields?: object) => void warned.push([event, fields]);
  createProxy({
    prefillers: ["p:1"],
    decoders: ["d:1"],
    pushLegs: "at-once",
    log: { ...silentLog, warn },
  });
  expect(warned).toEqual([["setting-unused", { setting: "pushLegs", why: "mode is pull" }]]);
});

test("an admin port that is taken is an error, and the proxy does not listen", async () => {
  const { url } = await small();
  const free = createProxy({ prefillers: ["p:1"], decoders: ["d:1"] });
  const { port } = await free.listen({ port: 0 });
  await free.close();
  const admin = { port: Number(new URL(url).port) };
  const half = createProxy({ prefillers: ["p:1"], decoders: ["d:1"], admin });
  await expect(half.listen({ port })).rejects.toThrow(`127.0.0.1:${admin.port}`);
  await expect(fetch(`http://127.0.0.1:${port}/health`)).rejects.toThrow();
  await half.close();
});

test("a port that is taken is an error that names it", async () => {
  const { url } = await small();
  const port = Number(new URL(url).port);
  const second = createProxy({ prefillers: ["p:1"], decoders: ["d:1"] });
  await expect(second.listen({ port })).rejects.toThrow(`127.0.0.1:${port}`);
  await second.close();
});
