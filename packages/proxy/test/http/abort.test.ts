import { decodeOk, STREAM, sendStream } from "@kv/testing/http/fake-upstream";
import { postText, rawClient } from "@kv/testing/http/raw-client";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test } from "vitest";
import { errorOf, runPair } from "../support/set-up.js";

test.each([
  ["prefill", "p", false],
  ["decode", "d", false],
  ["a stream", "d", true],
] as const)(
  "a client that disconnects during %s closes the leg's connection: it is no failure and no warning, as its own 400 is none",
  async (_, at, begins) => {
    const { log, events } = recordedLog();
    const running = await runPair({ [at]: () => {} }, { log });
    const { ask, proxy } = running;
    expect((await ask({ n: 0 })).status).toBe(400);
    const client = new AbortController();
    const asked = ask({ stream: true }, { signal: client.signal });
    const { dropped, response } = await running[at].request(0);
    if (begins) {
      response.writeHead(200, { "content-type": "text/event-stream" });
      response.write("data: {}\n\n");
      await asked;
    }
    client.abort();
    await expect(asked.then((answer) => answer.text())).rejects.toThrow();
    await dropped;
    await expect
      .poll(() => proxy.status().requests)
      .toMatchObject({ total: 2, in_flight: 0, failed: {}, aborted: 1, refused: { 400: 1 } });
    const well = { in_flight: 0, failures: 0, last_error: null, available: true };
    for (const one of [...proxy.status().prefillers, ...proxy.status().decoders])
      expect(one).toMatchObject(well);
    const names = events.map(({ event }) => event).filter((event) => event !== "pairing-off");
    expect(names).toEqual(["request-refused", "request-aborted"]);
  },
);

/** A client that sends its requests without waiting for answers. */
async function pipeline(url: string, prompts: readonly string[]) {
  const requests = prompts.map((prompt) => postText(JSON.stringify({ prompt })));
  const { socket, received } = await rawClient(url, requests.join(""));
  return { socket, statuses: () => received().match(/HTTP\/1\.1 [0-9]+/g) };
}

test("of pipelined requests, one at a time reaches an instance, and the answers come in order", async () => {
  const { p, d, url, proxy } = await runPair({ d: () => {} });
  const { socket, statuses } = await pipeline(url, ["a", "b", "c"]);
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
  const { socket } = await pipeline(url, ["a", "b", "c"]);
  const { dropped } = await d.request(0);
  socket.destroy();
  await dropped;
  await expect
    .poll(() => proxy.status().requests)
    .toMatchObject({ in_flight: 0, total: 1, failed: {}, aborted: 1 });
});

test("close refuses new requests, and resolves when those in flight have ended", async () => {
  const { ask, d, url, proxy } = await runPair({ d: () => {} });
  const asked = ask({ stream: true });
  const { response: decode } = await d.request(0);
  const closed = proxy.close();
  expect((await fetch(`${url}/health`)).status).toBe(503);
  expect((await ask()).status).toBe(503);
  sendStream(decode, STREAM);
  expect(await (await asked).text()).toBe(STREAM);
  await closed;
  await expect(ask()).rejects.toThrow();
});

test("close without grace aborts the requests in flight", async () => {
  const { p, ask, proxy } = await runPair({ p: () => {} });
  const asked = ask();
  const { dropped } = await p.request(0);
  const patient = proxy.close();
  await proxy.close({ graceMs: 0 });
  await patient;
  expect(await errorOf(await asked)).toMatchObject({ status: 503, code: "KV_REQUEST_ABORTED" });
  await dropped;
});
