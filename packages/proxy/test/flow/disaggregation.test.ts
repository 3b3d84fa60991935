import { type Answer, decodeOk, KV_PARAMS_TEXT, prefillOk } from "@kv/testing/http/fake-upstream";
import { POOL_PROMPT, poolContent } from "@kv/testing/http/pool-content";
import { manualClock } from "@kv/testing/manual-clock";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import { post, runFleet, runPair, sends, upstream } from "../support/set-up.js";

async function start(options: ProxyOptions, prefill = prefillOk) {
  const running = await runFleet([prefill], [decodeOk, decodeOk], options);
  const reasons = async () => {
    const found = (await running.metrics()).matchAll(
      /^kv_proxy_disaggregation_total\{legs="(\d)",reason="([a-z-]+)"\} (\d+)$/gm,
    );
    return Object.fromEntries(
      [...found].map(([, legs, reason, count]) => [`${legs} ${reason}`, Number(count)]),
    );
  };
  const [p, d1, d2] = [...running.p, ...running.d] as const;
  return { ...running, p, d1, d2, reasons };
}

/** Answers that a prompt had 300 tokens. */
const answer300: Answer = ({ response }) => {
  response.writeHead(200, { "content-type": "application/json" });
  response.end(
    `{"choices":[{"text":"x"}],"usage":{"prompt_tokens":300},"kv_transfer_params":${KV_PARAMS_TEXT}}`,
  );
};
const ids = (count: number, from = 0) => Array.from({ length: count }, (_, at) => from + at);
const prompts = (one: { seen: readonly { method: string }[] }) =>
  one.seen.filter(({ method }) => method === "POST").length;

test("a short prompt goes to a decode instance alone, a long one has two legs; the reason is in the metric", async () => {
  const { p, d1, d2, ask, reasons } = await start({ disaggregateAbove: 100 });
  for (const prompt of [ids(100), ids(101), "short", "x".repeat(1000)])
    expect((await ask({ prompt })).status).toBe(200);
  expect(prompts(p)).toBe(2);
  // Each in turn, also where the instance was chosen for the decision.
  expect([prompts(d1), prompts(d2)]).toEqual([2, 2]);
  expect(
    [...d1.seen, ...d2.seen].filter(({ json }) => json.kv_transfer_params !== undefined),
  ).toHaveLength(2);
  expect(await reasons()).toEqual({ "1 short-suffix": 2, "2 long-suffix": 2 });
});

test("the turns of a chat whose prefix a decode instance holds go there alone", async () => {
  const { p, d1, d2, url, reasons } = await start({
    disaggregateAbove: 100,
    routing: { prefill: "round-robin", decode: "prefix-aware" },
  });
  const messages = [{ role: "user", content: "a long system prompt ".repeat(100) }];
  for (let turn = 0; turn < 4; turn++) {
    await post(`${url}/v1/chat/completions`, { messages });
    messages.push(
      { role: "assistant", content: "hello" },
      { role: "user", content: `turn ${turn}` },
    );
  }
  expect(prompts(p)).toBe(1);
  expect([prompts(d1), prompts(d2)].sort()).toEqual([0, 4]);
  expect(Object.keys(await reasons()).sort()).toEqual(["1 short-suffix", "2 long-suffix"]);
});

test("a prompt that would wait for a prefill instance longer than it takes to compute goes to a decode instance alone", async () => {
  const held: (() => void)[] = [];
  let holds = false;
  const { p, ask, reasons } = await start({ disaggregateAbove: 100 }, (seen) =>
    holds ? void held.push(() => answer300(seen)) : answer300(seen),
  );
  await ask({ prompt: ids(300) });
  holds = true;
  const waiting = [1, 2, 3].map((from) => ask({ prompt: ids(300, from) }));
  await expect.poll(async () => (await reasons())["1 prefill-busy"] ?? 0).toBeGreaterThan(0);
  for (const send of held) send();
  holds = false;
  const statuses = (await Promise.all(waiting)).map(({ status }) => status);
  expect([statuses, prompts(p) < 4]).toEqual([[200, 200, 200], true]);
});

test("a decode instance with requests in flight computes few prompts a second, also short ones", async () => {
  const clock = manualClock();
  let decoding = () => {};
  const { p, d, ask } = await runPair(
    {
      p: (seen) => {
        clock.advance(1000);
        return answer300(seen);
      },
      d: (request) => {
        if (request.json.user !== "held") return decodeOk(request);
        decoding = () => void decodeOk(request);
      },
    },
    { disaggregateAbove: 100, clock },
  );
  const send = async (prompt: readonly number[], user = "") => {
    expect((await ask({ prompt, user })).status).toBe(200);
    return prompts(p);
  };
  expect(await send(ids(300))).toBe(1);
  // Each takes the instance 60 ms.
  const held = send(ids(18), "held");
  await expect.poll(() => prompts(d)).toBe(2);
  expect(await send(ids(18))).toBe(2);
  clock.advance(3000);
  expect(await send(ids(18))).toBe(2);
  decoding();
  expect(await held).toBe(2);
});

test.each([
  [0, "prefill-busy"],
  [10, "prefill-cached"],
])("what P can fetch from a pool counts: of %i blocks", async (blocks, reason) => {
  const clock = manualClock();
  const held: (() => void)[] = [];
  const pool = await upstream(sends(200, poolContent(blocks)));
  const { log, logged } = recordedLog();
  const { p, ask, proxy } = await runPair(
    {
      p: (seen) => {
        if ((seen.json.prompt as readonly number[])[0] === 2000)
          return void held.push(() => answer300(seen));
        clock.advance(1000);
        return answer300(seen);
      },
    },
    { disaggregateAbove: 100, clock, kvSources: { pools: [pool.url] }, log },
  );
  await expect.poll(() => proxy.status().kv_pools).toMatchObject([{ blocks, unused: null }]);
  expect((await ask({ prompt: ids(300, 1000) })).status).toBe(200);
  // Waiting takes P a second, and computing takes D half a second.
  const first = ask({ prompt: ids(300, 2000) });
  await expect.poll(() => prompts(p)).toBe(2);
  expect((await ask({ prompt: POOL_PROMPT })).status).toBe(200);
  await expect
    .poll(() => logged("request-done"))
    .toMatchObject([{ disaggregation: "long-suffix" }, { disaggregation: reason }]);
  for (const send of held) send();
  await first;
});

test("a decode instance that fails alone is replaced by another; P alone answers about a prompt", async () => {
  const { ask, p, d } = await runFleet([prefillOk], [sends(500), decodeOk], {
    disaggregateAbove: 100,
  });
  for (let index = 0; index < 2; index++)
    expect((await ask({ prompt: [1, 2, 3] })).status).toBe(200);
  expect([...d, ...p].map(prompts)).toEqual([2, 2, 0]);
  await ask({ prompt: [1, 2, 3], prompt_logprobs: 1 });
  expect(prompts(p[0])).toBeGreaterThan(0);
});

test("the copies of a long prompt begin as fast as their bodies leave, and not all at once", async () => {
  let [most, answered] = [0, 0];
  const { ask, proxy } = await runPair({
    p: (seen) => {
      most = Math.max(most, proxy.status().prefillers[0]?.in_flight ?? 0);
      answered += 1;
      prefillOk(seen);
    },
  });
  const response = await ask({ prompt: "a".repeat(200_000), n: 64 });
  expect([response.status, answered]).toEqual([200, 64]);
  expect(most).toBeLessThan(32);
});
