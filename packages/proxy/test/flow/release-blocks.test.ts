import {
  type Answer,
  deadUrl,
  decodeOk,
  prefillOk,
  sendJson,
} from "@kv/testing/http/fake-upstream";
import { manualClock } from "@kv/testing/manual-clock";
import { describe, expect, it, test } from "vitest";
import { isRelease, legsAt, releasesAt } from "../support/releases.js";
import { errorOf, post, runPair, runProxy, upstream } from "../support/set-up.js";
import { vllmPair } from "../support/vllm-stub.js";

test("P's blocks are freed when a decode instance refuses the request before its engine sees it", async () => {
  const vllm = vllmPair();
  // Like a gateway or an API key check in front of the server: the server never saw the parameters.

  const { url } = await runPair({
    p: vllm.prefill,
    d: (seen) =>
      isRelease(seen) ? vllm.decode(seen) : sendJson(seen.response, { error: {} }, 401),
  });
  expect((await post(`${url}/v1/completions`, { prompt: "a" })).status).toBe(401);
  await expect.poll(() => vllm.held.size).toBe(0);
});

const sends =
  (status: number): Answer =>
  ({ response }) =>
    sendJson(response, { error: { message: "no" } }, status);
const html: Answer = ({ response }) => {
  response.writeHead(200, { "content-type": "text/html" });
  response.end("<html>busy</html>");
};
const streamedError: Answer = ({ response }) => {
  response.writeHead(200, { "content-type": "text/event-stream" });
  response.end('data: {"error":{"message":"KV load failed","code":500}}\n\ndata: [DONE]\n\n');
};

describe.each([1, 2])("F2: D answers without a generation, %i instances", (decoders) => {
  it.each<[what: string, answer: Answer, stream?: boolean]>([
    ...[400, 401, 404, 429, 500, 501, 502, 503, 504, 204, 307].map((status): [string, Answer] => [
      String(status),
      sends(status),
    ]),
    ["HTML with 200", html],
    ["HTML with 200, for a stream", html, true],
    ["an empty body with 200", ({ response }) => void response.end()],
    ["a coding", ({ response }) => void response.setHeader("content-encoding", "br").end("x")],
    ["a stream where none was requested", streamedError],
    ["a stream that begins with an error", streamedError, true],
  ])("F2: each prefill has one release: %s", async (_, answer, stream = false) => {
    const vllm = vllmPair();
    const p = await upstream(vllm.prefill);
    const ds = await Promise.all(
      Array.from({ length: decoders }, () =>
        upstream((seen) => (isRelease(seen) ? vllm.decode(seen) : answer(seen))),
      ),
    );
    const { url } = await runProxy({ prefillers: [p.url], decoders: ds.map((d) => d.url) });
    for (let times = 0; times < 10; times += 1)
      expect((await post(`${url}/v1/completions`, { prompt: "a", stream })).status).not.toBe(200);
    await expect.poll(() => ds.reduce((sum, d) => sum + releasesAt(d), 0)).toBe(p.seen.length);
    expect([vllm.held.size, vllm.counts.unknownFrees]).toEqual([0, 0]);
  });
});

test("F2: an instance that breaks off, or that generates, frees the blocks itself", async () => {
  for (const breaks of [true, false]) {
    const vllm = vllmPair();
    const { d, url, proxy } = await runPair({
      p: vllm.prefill,
      d: (seen) => (breaks ? void seen.response.destroy() : vllm.decode(seen)),
    });
    await post(`${url}/v1/completions`, { prompt: "a" });
    await proxy.close();
    expect(releasesAt(d)).toBe(0);
    expect(legsAt(d)).toBe(breaks ? 2 : 1);
  }
});

test("F2: blocks are freed when one instance lacks the model and no other can be reached", async () => {
  const vllm = vllmPair();
  const p = await upstream(vllm.prefill);
  const d = await upstream((seen) => (isRelease(seen) ? vllm.decode(seen) : sends(404)(seen)));
  const { url } = await runProxy({
    prefillers: [p.url],
    decoders: [d.url, await deadUrl()],
    createRouting: () => ({ name: "first", choose: (candidates) => candidates[0] }),
  });
  expect((await post(`${url}/v1/completions`, { prompt: "a" })).status).toBe(502);
  await expect.poll(() => vllm.held.size).toBe(0);
});

test("when an instance does not free the blocks, the next one is tried", async () => {
  for (const first of ["refuses", "gone"]) {
    const vllm = vllmPair();
    const p = await upstream(vllm.prefill);
    const gateway = await upstream(({ response }) => sendJson(response, { error: {} }, 401));
    const dead = await deadUrl();
    const d = await upstream((seen) =>
      isRelease(seen) ? vllm.decode(seen) : sendJson(seen.response, { error: {} }, 400),
    );
    const others = [first === "gone" ? dead : gateway.url, d.url];
    const { url, adminUrl } = await runProxy({
      prefillers: [p.url],
      decoders: others,
      admin: { port: 0 },
      // The one that cannot pass it on comes first, but for the decode leg of the case in which it
      // is gone.
      createRouting: () => ({
        name: "fixed",
        choose: (candidates, { request }) =>
          candidates.at(first === "gone" && request !== undefined ? -1 : 0),
      }),
    });
    expect((await post(`${url}/v1/completions`, { prompt: "a" })).status).toBe(
      first === "gone" ? 400 : 401,
    );
    await expect.poll(() => vllm.held.size).toBe(0);
    await expect
      .poll(async () => (await fetch(`${adminUrl}/metrics`)).text())
      .toContain('kv_proxy_released_total{outcome="refused"} 1');
  }
});

test("a release that only gateways answer fails after two attempts", async () => {
  const vllm = vllmPair();
  const p = await upstream(vllm.prefill);
  const ds = await Promise.all(
    [0, 1, 2].map(() => upstream(({ response }) => sendJson(response, { error: {} }, 401))),
  );
  const { url, adminUrl } = await runProxy({
    prefillers: [p.url],
    decoders: ds.map((d) => d.url),
    admin: { port: 0 },
  });
  expect((await post(`${url}/v1/completions`, { prompt: "a" })).status).toBe(401);
  await expect
    .poll(async () => (await fetch(`${adminUrl}/metrics`)).text())
    .toContain('kv_proxy_released_total{outcome="failed"} 1');
  expect(ds.flatMap(({ seen }) => seen.filter(isRelease))).toHaveLength(2);
  expect(vllm.held.size).toBe(1);
});

test("when no decode instance can be reached, the request fails and the blocks stay until their lease ends", async () => {
  const vllm = vllmPair();
  const p = await upstream(vllm.prefill);
  const dead = await deadUrl();
  const { url } = await runProxy({ prefillers: [p.url], decoders: [dead] });
  const asked = post(`${url}/v1/completions`, { prompt: "a" });
  expect((await asked).status).toBe(502);
  expect(vllm.held.size).toBe(1);
});

test("a request that times out between the legs has its blocks freed without a transfer", async () => {
  const clock = manualClock();
  const vllm = vllmPair();
  const { d, url } = await runPair(
    { p: vllm.prefill, d: vllm.decode },
    {
      clock,
      timeouts: { requestMs: 1000 },
      createRouting: () => ({
        name: "slow",
        choose(candidates, { request }) {
          if (candidates[0]?.role === "decode" && request !== undefined) clock.advance(1000);
          return candidates[0];
        },
      }),
    },
  );
  expect((await post(`${url}/v1/completions`, { prompt: "a" })).status).toBe(504);
  await expect.poll(() => vllm.held.size).toBe(0);
  expect(d.seen.every(isRelease)).toBe(true);
  expect(vllm.counts).toEqual({ computedAtDecode: 0, garbage: 0, unknownFrees: 0 });
});

test("a part whose lease may have ended begins again with prefill", async () => {
  const clock = manualClock();
  const vllm = vllmPair();
  let late = true;
  const { p, url, proxy } = await runPair(
    { p: vllm.prefill, d: vllm.decode },
    {
      clock,
      timeouts: { leaseMs: 1000 },
      createRouting: () => ({
        name: "slow",
        choose: (candidates) => {
          if (candidates[0]?.role === "decode" && late) {
            late = false;
            clock.advance(1000);
          }
          return candidates[0];
        },
      }),
    },
  );
  const answer = (await (await post(`${url}/v1/completions`, { prompt: "a" })).json()) as {
    choices: { text: string }[];
  };
  expect(answer.choices[0]?.text).not.toContain("GARBAGE");
  expect([p.seen.length, vllm.counts.garbage]).toEqual([2, 0]);
  await expect.poll(() => vllm.held.size).toBe(0);
  expect(proxy.status().decoders[0]?.in_flight).toBe(0);
});

test("when a decode instance breaks off after it has read the blocks, the part begins again with new blocks", async () => {
  const vllm = vllmPair();
  const p = await upstream(vllm.prefill);
  const breaking = await upstream((seen) => {
    // It notifies P that it has read the blocks, and dies.
    void vllm.decode({ ...seen, response: { writeHead() {}, end() {}, write() {} } as never });
    seen.response.destroy();
  });
  const d = await upstream(vllm.decode);
  const { url } = await runProxy({ prefillers: [p.url], decoders: [breaking.url, d.url] });
  const answer = (await (await post(`${url}/v1/completions`, { prompt: "abc" })).json()) as {
    choices: { text: string }[];
  };
  expect(answer.choices[0]?.text).toBe(" 1.0.0 1.0.1 1.0.2 1.0.3 1.0.4");
  expect([p.seen.length, breaking.seen.length, d.seen.length]).toEqual([2, 1, 1]);
  expect([vllm.held.size, vllm.counts.garbage]).toEqual([0, 0]);
});

test("a stream that has begun is never retried", async () => {
  const p = await upstream(prefillOk);
  const breaking = await upstream(({ response }) => {
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.write("data: {}\n\n", () => setImmediate(() => response.destroy()));
  });
  const d = await upstream(decodeOk);
  const { url } = await runProxy({ prefillers: [p.url], decoders: [breaking.url, d.url] });
  const response = await post(`${url}/v1/completions`, { prompt: "a", stream: true });
  await expect(response.text()).rejects.toThrow();
  expect([p.seen.length, d.seen.length]).toEqual([1, 0]);
});

test("a failed part aborts the other parts, and its error is the answer", async () => {
  const { url, proxy } = await runPair({
    d: (seen) => {
      if (seen.json.prompt !== "waits for ever")
        sendJson(seen.response, { error: { message: "no" } }, 500);
    },
  });
  const asked = post(`${url}/v1/completions`, { prompt: ["waits for ever", "bad"] });
  expect((await asked).status).toBe(500);
  await expect.poll(() => proxy.status().decoders[0]?.in_flight).toBe(0);
});

test("the deadline of a request aborts the legs of all its parts", async () => {
  const clock = manualClock();
  const { p, url } = await runPair({ p: () => {} }, { clock, timeouts: { requestMs: 1000 } });
  const asked = post(`${url}/v1/completions`, { prompt: ["a", "b", "c"] });
  const dropped = await Promise.all(
    [0, 1, 2].map(async (at) => (await p.request(at)).dropped.then),
  );
  expect(dropped).toHaveLength(3);
  clock.advance(1000);
  expect(await errorOf(await asked)).toMatchObject({ status: 504, code: "KV_REQUEST_TIMEOUT" });
  await Promise.all([0, 1, 2].map(async (at) => (await p.request(at)).dropped));
});
