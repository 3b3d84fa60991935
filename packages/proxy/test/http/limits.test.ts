import { once } from "node:events";
import { postText, rawClient } from "@kv/testing/http/raw-client";
import { manualClock } from "@kv/testing/manual-clock";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test } from "vitest";
import { createProxy } from "../../src/index.js";
import { errorOf, runPair, runProxy, sends } from "../support/set-up.js";

/** A client that sends an incomplete request. */
async function startSending(url: string, lengthBytes = 100) {
  const head = postText("").replace("length: 0", `length: ${lengthBytes}`);
  const { socket, received } = await rawClient(url, `${head}{`);
  return { socket, answer: received };
}

const small = () =>
  runPair({}, { limits: { bodyLengthBytes: 1000, prefillAnswerLengthBytes: 400 } });
const NONE = { prefillers: ["p:1"], decoders: ["d:1"] };

test("a client that is still sending a body above the limit gets the 413 and no reset", async () => {
  const { url } = await small();
  const lengthBytes = 32 * 1024 * 1024;
  const { socket, answer } = await startSending(url, lengthBytes);
  await expect
    .poll(answer)
    .toMatch(/^HTTP\/1\.1 413 .*larger than 1000 bytes.*"code":"KV_REQUEST_INVALID"/s);
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
  const { url } = await runProxy({ ...NONE, limits: { bodyLengthBytes: 1 }, clock });
  const { socket, answer } = await startSending(url);
  await expect.poll(answer).toContain(" 413 ");
  expect(socket.readyState).toBe("open");
  const ended = once(socket, "end");
  clock.advance(30_000);
  await ended;
});

test("an incomplete request does not keep the proxy from closing", async () => {
  const { url, proxy } = await runProxy(NONE);
  const { socket } = await startSending(url);
  const gone = once(socket, "close");
  // The second connection got an answer, so the server has the first one too.
  await fetch(`${url}/health`);
  await proxy.close({ graceMs: 1 });
  await gone;
});

test("idle connections are kept for 75 s, or for the time in the settings", async () => {
  const { url } = await small();
  expect((await fetch(`${url}/health`)).headers.get("keep-alive")).toBe("timeout=75");
  const { url: other } = await runProxy({ ...NONE, timeouts: { keepAliveMs: 3_000 } });
  expect((await fetch(`${other}/health`)).headers.get("keep-alive")).toBe("timeout=3");
});

test("refuses bodies that are not JSON, by type or content, and input that is not HTTP", async () => {
  const { ask, url } = await small();
  const text = await ask("x", { headers: { "content-type": "text/plain" } });
  expect(await errorOf(text)).toMatchObject({ status: 415, code: "KV_REQUEST_INVALID" });
  expect(await errorOf(await ask("{"))).toMatchObject({ status: 400 });
  const noise = await (await rawClient(url, "\0\0\r\n\r\n")).closed;
  expect(noise).toMatch(/^HTTP\/1\.1 400 /);
  expect(noise).toContain("KV_REQUEST_INVALID");
});

test("a prefill answer above the limit is an error", async () => {
  const limits = { prefillAnswerLengthBytes: 500 };
  const { ask } = await runPair({ p: sends(200, { text: "a".repeat(1000) }) }, { limits });
  expect((await errorOf(await ask())).message).toContain("more than 500 bytes");
});

test.each([
  [{ prefillers: [] }, "KV_CONFIG_INVALID", "no prefill instance"],
  [{ prefillers: ["p:1", "http://p:1/"] }, "KV_CONFIG_INVALID", "given twice"],
  [{ timeouts: { prefillMs: -1 } }, "KV_CONFIG_INVALID", "prefillMs"],
  [{ limits: { bodyBytes: 1 } }, "KV_CONFIG_UNKNOWN_KEY", "bodyBytes"],
  [{ prefilers: [] }, "KV_CONFIG_UNKNOWN_KEY", "prefilers"],
])("settings %j are refused with %s", (settings, code, message) => {
  expect(() => createProxy({ ...NONE, ...(settings as object) })).toThrow(
    expect.objectContaining({ code, message: expect.stringContaining(message) }),
  );
});

test("settings without effect are logged", () => {
  const { log, logged } = recordedLog();
  createProxy({ ...NONE, pushLegs: "at-once", log });
  expect(logged("setting-unused")).toEqual([{ setting: "pushLegs", why: "mode is pull" }]);
});

test("a port that is taken, also the admin port, is an error that names it, and the proxy does not listen", async () => {
  const { url } = await small();
  const taken = Number(new URL(url).port);
  const free = createProxy(NONE);
  const { port } = await free.listen({ port: 0 });
  await free.close();
  for (const [admin, own] of [
    [taken, port],
    [0, taken],
  ] as const) {
    const half = createProxy({ ...NONE, admin: { port: admin } });
    await expect(half.listen({ port: own })).rejects.toThrow(`127.0.0.1:${taken}`);
    await half.close();
  }
  await expect(fetch(`http://127.0.0.1:${port}/health`)).rejects.toThrow();
});
