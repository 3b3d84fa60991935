import { ServerResponse } from "node:http";
import { gzipSync } from "node:zlib";
import {
  type Answer,
  COMPLETION,
  STREAM,
  sendJson,
  sendStream,
} from "@kv/testing/http/fake-upstream";
import { postText, rawClient } from "@kv/testing/http/raw-client";
import { expect, test, vi } from "vitest";
import { errorOf, runPair } from "../support/set-up.js";

/** Each describes one answer, and not one that is made of three. */
const OF_ONE_ANSWER = {
  etag: '"1"',
  "last-modified": "Thu, 26 Nov 2026 12:00:00 GMT",
  "content-md5": "Q2hlY2sgSW50ZWdyaXR5IQ==",
  digest: "sha-256=X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=",
  "content-digest": "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:",
  "repr-digest": "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:",
  "content-range": "bytes 0-1/2",
  "accept-ranges": "bytes",
  "x-checksum-sha256": "X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=",
  "x-completion-tokens": "5",
};

test.each([true, false])(
  "GIE#2996: no header of one answer stands on a merged one, streamed: %s",
  async (stream) => {
    const { ask } = await runPair({
      d: ({ response }) => {
        for (const [name, value] of Object.entries(OF_ONE_ANSWER)) response.setHeader(name, value);
        response.setHeader("cache-control", "no-store");
        if (!stream) return sendJson(response, COMPLETION);
        response.setHeader("content-length", Buffer.byteLength(STREAM));
        return sendStream(response, STREAM);
      },
    });
    const response = await ask({ n: 3, stream });
    const text = await response.text();
    const headers = Object.fromEntries(response.headers);
    for (const name of Object.keys(OF_ONE_ANSWER)) expect(headers).not.toHaveProperty(name);
    expect(headers["cache-control"]).toBe("no-store");
    if (stream) {
      expect(headers).not.toHaveProperty("content-length");
      expect(text.match(/"index":[012]/g)).toHaveLength(3);
      expect(text.endsWith("data: [DONE]\n\n")).toBe(true);
    } else {
      expect(headers["content-length"]).toBe(String(Buffer.byteLength(text)));
      expect((JSON.parse(text) as { choices: unknown[] }).choices).toHaveLength(3);
    }
    // A single answer passes as it is.
    const single = await ask({ stream });
    expect(Object.fromEntries(single.headers)).toMatchObject(OF_ONE_ANSWER);
  },
);

test("a single stream with a content-length may end with an error event", async () => {
  const [event = ""] = STREAM.split("data: [DONE]");
  const { d, url } = await runPair({ d: () => {} });
  const { closed, received } = await rawClient(url, postText('{"prompt":"a","stream":true}'));
  const { response } = await d.request(0);
  const { length } = event + event;
  response.writeHead(200, { "content-type": "text/event-stream", "content-length": length });
  response.write(event);
  await expect.poll(received).toContain(event);
  response.end(event);
  await closed;
  expect(received()).not.toMatch(/content-length/i);
  expect(received()).toContain("ended its stream without its last event");
});

test.each(["application/json", "text/event-stream"])(
  "a server failure of the type %s that is changed has no header of the one that the instance sent",
  async (type) => {
    const { ask } = await runPair({
      d: ({ response }) => {
        response
          .setHeader("etag", '"1"')
          .setHeader("content-digest", "sha-256=:AA==:")
          .setHeader("retry-after", "7");
        const message = "no KV from 10.1.2.3:5600, see http://p1.internal:8100/metrics";
        response.writeHead(500, { "content-type": type });
        response.end(`data: ${JSON.stringify({ error: { message } })}\n\n`);
      },
    });
    const response = await ask();
    expect([response.status, response.headers.get("retry-after")]).toEqual([500, "7"]);
    expect([response.headers.get("etag"), response.headers.get("content-digest")]).toEqual([
      null,
      null,
    ]);
    expect(await response.text()).not.toMatch(/10\.1\.2\.3|internal/);
  },
);

test.each(["prefill", "decode"])(
  "an answer of the %s instance in a coding that no leg accepts is a 502 that names it",
  async (role) => {
    const gzipped: Answer = ({ response }) => {
      response.writeHead(200, { "content-type": "application/json", "content-encoding": "gzip" });
      response.end(gzipSync(JSON.stringify(COMPLETION)));
    };
    const { ask } = await runPair({ [role === "prefill" ? "p" : "d"]: gzipped });
    for (const n of [1, 2]) {
      const error = await errorOf(await ask({ n }));
      expect(error).toMatchObject({
        status: 502,
        message: expect.stringContaining("content-encoding gzip"),
      });
    }
  },
);

test("a failure in the tick of the first events reaches the client after them", async () => {
  const { url, proxy } = await runPair({
    d: ({ json, response }) =>
      sendStream(
        response,
        json.prompt === "good" ? STREAM : STREAM.replace("data: [DONE]", "data: {"),
      ),
  });
  for (const prompt of [
    ["good", "bad"],
    ["bad", "good"],
    ["bad", "bad"],
  ]) {
    const { closed } = await rawClient(url, postText(JSON.stringify({ prompt, stream: true })));
    const received = await closed;
    expect(received).toMatch(/^HTTP\/1\.1 200 /);
    expect(received).toContain('"index":0');
    expect(received).toContain("sent an event that is not JSON");
    // The end of a complete answer is missing.
    expect(received).not.toMatch(/\r\n0\r\n\r\n$/);
  }
  await expect.poll(() => proxy.status().requests.failed).toEqual({ KV_PROXY_UPSTREAM_FAILED: 3 });
});

test.each([
  ["late", "soon"],
  ["soon", "late"],
])(
  "a merged stream has the client's id, where %s is before %s and the other is there first",
  async (...prompt) => {
    let answered = () => {};
    const first = new Promise<void>((resolve) => {
      answered = resolve;
    });
    const { url } = await runPair({
      d: async ({ headers, json, response }) => {
        if (json.prompt === "late") await first;
        response.once("finish", answered);
        sendStream(response, STREAM.replace("cmpl-1", `cmpl-${String(headers["x-request-id"])}`));
      },
    });
    const body = JSON.stringify({ prompt, stream: true });
    const { socket, received } = await rawClient(url, postText(body, "x-request-id: r\r\n"));
    await expect.poll(received).toContain("[DONE]");
    socket.destroy();
    expect(new Set(received().match(/"id":"[^"]*"/g))).toEqual(new Set(['"id":"cmpl-r"']));
  },
);

test("field.md R13: with n, an error in the tick of the first events is told to the client", async () => {
  const [event = ""] = STREAM.split("data: [DONE]");
  const { url } = await runPair({
    d: ({ response }) =>
      sendStream(
        response,
        `${event}data: {"error":{"message":"out of memory","code":500}}\n\ndata: [DONE]\n\n`,
      ),
  });
  const { closed } = await rawClient(url, postText('{"prompt":"a","stream":true,"n":2}'));
  expect(await closed).toMatch(/^HTTP\/1\.1 (200 .*"error"|502 )/s);
});

test("streams that are there at once are merged in turns of the event loop, one part in each", async () => {
  const { ask } = await runPair({ d: ({ response }) => sendStream(response, STREAM) });
  let turn = 0;
  let isCounting = true;
  const count = () => {
    turn += 1;
    if (isCounting) setImmediate(count);
  };
  setImmediate(count);
  const turns = new Set<number>();
  const write = ServerResponse.prototype.write;
  vi.spyOn(ServerResponse.prototype, "write").mockImplementation(function (
    this: ServerResponse,
    ...args
  ) {
    // Only a merged answer is written as text.
    if (String(args[0]).includes('"index":') && typeof args[0] === "string") turns.add(turn);
    return Reflect.apply(write, this, args) as boolean;
  });
  const text = await (await ask({ n: 32, stream: true })).text();
  isCounting = false;
  vi.restoreAllMocks();
  expect(new Set(text.match(/"index":\d+/g)).size).toBe(32);
  expect(turns.size).toBeGreaterThanOrEqual(32);
});
