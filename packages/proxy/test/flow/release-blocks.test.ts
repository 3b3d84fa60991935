import type { RoutingContext } from "@kv/fleet";
import { type Answer, deadUrl, sendStream } from "@kv/testing/http/fake-upstream";
import { manualClock } from "@kv/testing/manual-clock";
import { describe, expect, it, test } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import { isRelease, legsAt, releasesAt } from "../support/releases.js";
import {
  breaks,
  errorOf,
  FIRST,
  html,
  runFleet,
  runPair,
  sends,
  upstream,
} from "../support/set-up.js";
import { vllmPair } from "../support/vllm-stub.js";

const streamedError: Answer = ({ response }) =>
  sendStream(
    response,
    'data: {"error":{"message":"KV load failed","code":500}}\n\ndata: [DONE]\n\n',
  );
/** A P and a D of vLLM; before D stands a gateway that answers so, but for releases. */
function behind(gateway: Answer) {
  const vllm = vllmPair();
  const d: Answer = (seen) => (isRelease(seen) ? vllm.decode(seen) : gateway(seen));
  return { vllm, d };
}

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
    const { vllm, d: one } = behind(answer);
    const ds = Array.from({ length: decoders }, () => one);
    const { ask, p, d } = await runFleet([vllm.prefill], ds);
    for (let times = 0; times < 10; times += 1)
      expect((await ask({ stream })).status).not.toBe(200);
    await expect
      .poll(() => d.reduce((sum, one) => sum + releasesAt(one), 0))
      .toBe(p[0].seen.length);
    expect([vllm.held.size, vllm.counts.unknownFrees]).toEqual([0, 0]);
  });
});

test("F2: an instance that breaks off, or that generates, frees the blocks itself", async () => {
  for (const isBroken of [true, false]) {
    const vllm = vllmPair();
    const { prefill: p, decode } = vllm;
    const { ask, d, proxy } = await runPair({ p, d: isBroken ? breaks : decode });
    await ask();
    await proxy.close();
    expect([releasesAt(d), legsAt(d)]).toEqual([0, isBroken ? 2 : 1]);
  }
});

test("F2: blocks are freed when one instance lacks the model and no other can be reached", async () => {
  const { vllm, d } = behind(sends(404));
  const { ask, proxy } = await runFleet([vllm.prefill], [d], FIRST);
  proxy.instances.decode.add({ url: await deadUrl() });
  expect((await ask()).status).toBe(502);
  await expect.poll(() => vllm.held.size).toBe(0);
});

test.each(["refuses", "is gone"])(
  "when an instance does not free the blocks, as it %s, the next one is tried",
  async (how) => {
    const { vllm, d } = behind(sends(400));
    const isGone = how === "is gone";
    const other = isGone ? await deadUrl() : (await upstream(sends(401))).url;
    const { ask, metrics } = await runFleet([vllm.prefill], [], {
      decoders: [other, (await upstream(d)).url],
      // The one that cannot pass it on comes first, but for the decode leg of the case in which it
      // is gone.
      createRouting: () => ({
        name: "fixed",
        choose: (candidates, { request }) =>
          candidates.at(isGone && request !== undefined ? -1 : 0),
      }),
    });
    expect((await ask()).status).toBe(400);
    await expect.poll(() => vllm.held.size).toBe(0);
    await expect
      .poll(metrics)
      .toContain(`kv_proxy_released_total{outcome="refused"} ${isGone ? 1 : 2}`);
  },
);

test("a release that only gateways answer fails after two attempts", async () => {
  const vllm = vllmPair();
  const gateways = [sends(401), sends(401), sends(401)];
  const { ask, d, metrics } = await runFleet([vllm.prefill], gateways);
  expect((await ask()).status).toBe(401);
  await expect.poll(metrics).toContain('kv_proxy_released_total{outcome="failed"} 3');
  expect(d.reduce((sum, one) => sum + releasesAt(one), 0)).toBe(2 * 3);
  expect(vllm.held.size).toBe(3);
});

test("when no decode instance can be reached, the request fails and the blocks stay until their lease ends", async () => {
  const vllm = vllmPair();
  const { ask } = await runFleet([vllm.prefill], [], { decoders: [await deadUrl()] });
  expect((await ask()).status).toBe(502);
  expect(vllm.held.size).toBe(1);
});

/** The choice of a D takes the time of a lease or a request, `isSlow` permitting. */
const slowRouting = (
  clock: ReturnType<typeof manualClock>,
  isSlow: (context: RoutingContext) => boolean,
): ProxyOptions => ({
  clock,
  createRouting: () => ({
    name: "slow",
    choose(candidates, context) {
      if (candidates[0]?.role === "decode" && isSlow(context)) clock.advance(1000);
      return candidates[0];
    },
  }),
});

test("a request that times out between the legs has its blocks freed without a transfer", async () => {
  const vllm = vllmPair();
  const { ask, d } = await runPair(
    { p: vllm.prefill, d: vllm.decode },
    {
      ...slowRouting(manualClock(), ({ request }) => request !== undefined),
      timeouts: { requestMs: 1000 },
    },
  );
  expect((await ask()).status).toBe(504);
  await expect.poll(() => vllm.held.size).toBe(0);
  expect(d.seen.every(isRelease)).toBe(true);
  expect(vllm.counts).toEqual({ computedAtDecode: 0, garbage: 0, unknownFrees: 0 });
});

const textOf = async (response: Response) =>
  ((await response.json()) as { choices: { text: string }[] }).choices[0]?.text;

test("a part whose lease may have ended begins again with prefill", async () => {
  const vllm = vllmPair();
  let choices = 0;
  const { ask, p, proxy } = await runPair(
    { p: vllm.prefill, d: vllm.decode },
    { ...slowRouting(manualClock(), () => choices++ === 0), timeouts: { leaseMs: 1000 } },
  );
  expect(await textOf(await ask())).not.toContain("GARBAGE");
  expect([p.seen.length, vllm.counts.garbage]).toEqual([2, 0]);
  await expect.poll(() => vllm.held.size).toBe(0);
  expect(proxy.status().decoders[0]?.in_flight).toBe(0);
});

test("when a decode instance breaks off after it has read the blocks, the part begins again with new blocks", async () => {
  const vllm = vllmPair();
  const dies: Answer = (seen) => {
    // It notifies P that it has read the blocks, and dies.
    void vllm.decode({ ...seen, response: { writeHead() {}, end() {}, write() {} } as never });
    seen.response.destroy();
  };
  const { ask, p, d } = await runFleet([vllm.prefill], [dies, vllm.decode]);
  expect(await textOf(await ask({ prompt: "abc" }))).toBe(" 1.0.0 1.0.1 1.0.2 1.0.3 1.0.4");
  expect([...p, ...d].map(({ seen }) => seen.length)).toEqual([2, 1, 1]);
  expect([vllm.held.size, vllm.counts.garbage]).toEqual([0, 0]);
});

test("a failed part aborts the other parts, and its error is the answer", async () => {
  const { ask, proxy } = await runPair({
    d: (seen) => (seen.json.prompt === "waits for ever" ? undefined : sends(500)(seen)),
  });
  expect((await ask({ prompt: ["waits for ever", "bad"] })).status).toBe(500);
  await expect.poll(() => proxy.status().decoders[0]?.in_flight).toBe(0);
});

test("the deadline of a request aborts the legs of all its parts", async () => {
  const clock = manualClock();
  const { ask, p } = await runPair({ p: () => {} }, { clock, timeouts: { requestMs: 1000 } });
  const asked = ask({ prompt: ["a", "b", "c"] });
  const legs = await Promise.all([0, 1, 2].map((at) => p.request(at)));
  clock.advance(1000);
  expect(await errorOf(await asked)).toMatchObject({ status: 504, code: "KV_REQUEST_TIMEOUT" });
  await Promise.all(legs.map(({ dropped }) => dropped));
});
