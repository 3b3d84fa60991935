import { connect } from "node:net";
import { decodeOk, prefillOk } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { errorOf, post, runPair, runProxy, upstream } from "../support/set-up.js";

test.each(["prefill", "decode"])(
  "a client that disconnects during %s closes the leg's connection",
  async (role) => {
    const silent = await upstream(() => {});
    const p = await upstream(prefillOk);
    const { url, proxy } = await runProxy({
      prefillers: [role === "prefill" ? silent.url : p.url],
      decoders: [silent.url],
    });
    const client = new AbortController();
    const asked = post(`${url}/v1/completions`, { prompt: "a" }, { signal: client.signal });
    const { dropped } = await silent.request(0);
    client.abort();
    await expect(asked).rejects.toThrow();
    await dropped;
    expect(silent.seen).toHaveLength(1);
    await expect
      .poll(() => proxy.status().requests)
      .toMatchObject({ in_flight: 0, failed: {}, aborted: 1 });
    // The disconnect does not count as a failure of the instance.
    for (const one of [...proxy.status().prefillers, ...proxy.status().decoders]) {
      expect(one).toMatchObject({ in_flight: 0, failures: 0, available: true });
    }
  },
);

test("a client that disconnects in the middle of a stream aborts the decode leg", async () => {
  const { d, url, proxy } = await runPair({
    d: ({ response }) => {
      response.writeHead(200, { "content-type": "text/event-stream" });
      response.write("data: {}\n\n");
    },
  });
  const client = new AbortController();
  const response = await post(
    `${url}/v1/completions`,
    { prompt: "a", stream: true },
    { signal: client.signal },
  );
  await response.body?.getReader().read();
  client.abort();
  await (await d.request(0)).dropped;
  await expect
    .poll(() => proxy.status().requests)
    .toMatchObject({ in_flight: 0, failed: {}, aborted: 1 });
});

/** A client that sends its requests without waiting for answers. */
function pipeline(url: string, prompts: readonly string[]) {
  const requests = prompts.map((prompt) => {
    const body = JSON.stringify({ prompt });
    return `POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ${body.length}\r\n\r\n${body}`;
  });
  const socket = connect(Number(new URL(url).port), "127.0.0.1", () =>
    socket.write(requests.join("")),
  );
  let received = "";
  socket.setEncoding("utf8").on("data", (text: string) => (received += text));
  return { socket, statuses: () => received.match(/HTTP\/1\.1 [0-9]+/g) };
}

test("of pipelined requests, one at a time reaches an instance, and the answers come in order", async () => {
  const { p, d, url, proxy } = await runPair({ d: () => {} });
  const { socket, statuses } = pipeline(url, ["a", "b", "c"]);
  for (const index of [0, 1, 2]) {
    const leg = await d.request(index);
    expect([p.seen.length, d.seen.length, proxy.status().requests.in_flight]).toEqual([
      index + 1,
      index + 1,
      1,
    ]);
    await decodeOk(leg);
  }
  await expect.poll(statuses).toEqual(Array(3).fill("HTTP/1.1 200"));
  socket.destroy();
  await expect.poll(() => proxy.status().requests).toMatchObject({ in_flight: 0, succeeded: 3 });
});

test("when a client disconnects, its pipelined requests never begin", async () => {
  const { d, url, proxy } = await runPair({ d: () => {} });
  const { socket } = pipeline(url, ["a", "b", "c"]);
  const { dropped } = await d.request(0);
  socket.destroy();
  await dropped;
  await expect
    .poll(() => proxy.status().requests)
    .toMatchObject({ in_flight: 0, total: 1, failed: {}, aborted: 1 });
});

test("close refuses new requests, and resolves when those in flight have ended", async () => {
  const { d, url, proxy } = await runPair({ d: () => {} });
  const asked = post(`${url}/v1/completions`, { prompt: "a", stream: true });
  const { response: decode } = await d.request(0);
  const closed = proxy.close();
  expect((await fetch(`${url}/health`)).status).toBe(503);
  expect(await errorOf(await post(`${url}/v1/completions`, { prompt: "b" }))).toMatchObject({
    status: 503,
  });
  decode.writeHead(200, { "content-type": "text/event-stream" });
  decode.end('data: {"choices":[{}]}\n\ndata: [DONE]\n\n');
  expect(await (await asked).text()).toBe('data: {"choices":[{}]}\n\ndata: [DONE]\n\n');
  await closed;
  await expect(post(`${url}/v1/completions`, { prompt: "b" })).rejects.toThrow();
});

test("close without grace aborts the requests in flight", async () => {
  const { p, url, proxy } = await runPair({ p: () => {} });
  const asked = post(`${url}/v1/completions`, { prompt: "a" });
  const { dropped } = await p.request(0);
  const patient = proxy.close();
  await proxy.close({ graceMs: 0 });
  await patient;
  expect(await errorOf(await asked)).toMatchObject({ status: 503, code: "KV_REQUEST_ABORTED" });
  await dropped;
});
