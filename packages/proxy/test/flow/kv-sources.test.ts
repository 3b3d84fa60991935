import {
  type Answer,
  decodeOk,
  prefillOk,
  type Seen,
  sendJson,
} from "@kv/testing/http/fake-upstream";
import { POOL_PEER, POOL_PROMPT, poolContent } from "@kv/testing/http/pool-content";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import { runFleet, runPair, upstream } from "../support/set-up.js";

/** A proxy with one P and one D that follows a pool, whose answer may change. */
async function withPool(first: object, more: object = {}) {
  let answer: object = first;
  const pool = await upstream(({ response, path }) => {
    const epoch = new URL(path, "http://pool").searchParams.get("epoch");
    const known = "epoch" in answer && answer.epoch === epoch;
    return sendJson(response, known ? { ...answer, changes: [] } : answer);
  });
  const { p, ...running } = await runPair({}, { kvSources: { pools: [pool.url], ...more } });
  const becomes = (expected: object) =>
    expect.poll(() => running.proxy.status().kv_pools[0]).toMatchObject(expected);
  /** The source that the next request's prefill leg names. */
  const sourceOf = async (body: object) => {
    expect((await running.ask(body)).status).toBe(200);
    const params = p.seen.at(-1)?.json.kv_transfer_params;
    return (params as { remote_kv_source?: object }).remote_kv_source;
  };
  const changeTo = (changed: object) => {
    answer = changed;
  };
  return { ...running, pool, becomes, sourceOf, changeTo };
}

const NAMED = {
  kv_request_id: expect.stringMatching(/^[0-9a-f-]{36}$/),
  remote_host: "10.0.0.9",
  remote_port: 5710,
};

test("P is told which pool has the prompt's start, by exact keys", async () => {
  const { sourceOf, becomes, adminUrl } = await withPool(poolContent(3));
  await becomes({ peer: POOL_PEER, unused: null, blocks: 3 });
  expect(await sourceOf({ prompt: POOL_PROMPT })).toEqual(NAMED);
  const requests = await (await fetch(`${adminUrl}/requests`)).json();
  expect(requests).toMatchObject([{ kv_source: POOL_PEER, kv_source_tokens: 48 }]);
  const other = POOL_PROMPT.with(0, 99);
  expect(await sourceOf({ prompt: other })).toBeUndefined();
  // Its blocks have other keys in the engine.
  expect(await sourceOf({ prompt: POOL_PROMPT, cache_salt: "s" })).toBeUndefined();
  expect(await sourceOf({ prompt: POOL_PROMPT.slice(0, 15) })).toBeUndefined();
});

test.each([
  ["drains", { ...poolContent(3), draining: true }, "it drains"],
  ["has seen no engine", { ...poolContent(3), block_size: null }, "no engine has announced"],
  ["answers with something else", { hello: "world" }, "cannot be read"],
])("a pool that %s is not named, and the log says why", async (_, changed, why) => {
  const { sourceOf, becomes, changeTo } = await withPool(poolContent(3));
  await becomes({ unused: null, blocks: 3 });
  changeTo(changed);
  await becomes({ unused: expect.stringContaining(why) });
  expect(await sourceOf({ prompt: POOL_PROMPT })).toBeUndefined();
  changeTo(poolContent(2));
  await becomes({ unused: null, blocks: 2 });
  expect(await sourceOf({ prompt: POOL_PROMPT })).toEqual(NAMED);
});

test("a new P fetches what was asked for before it takes load, and a leaving one hands over", async () => {
  const { sourceOf, becomes, proxy, pool } = await withPool(poolContent(3), {
    tierPort: 7777,
  });
  await becomes({ unused: null, blocks: 3 });
  await sourceOf({ prompt: POOL_PROMPT, model: "m" });
  await sourceOf({ prompt: POOL_PROMPT.with(0, 99), model: "m" });

  let held: Seen | undefined;
  const added = await upstream((seen) => {
    if (held !== undefined || seen.path !== "/v1/completions") return prefillOk(seen);
    held = seen;
  });
  const { prefill } = proxy.instances;
  prefill.add({ url: added.url });
  await expect.poll(() => held).toBeDefined();
  const states = () => proxy.status().prefillers.map(({ state }) => state);
  expect(states()).toEqual(["up", "warming"]);
  expect(held?.json).toEqual({
    model: "m",
    prompt: POOL_PROMPT.slice(0, 48),
    max_tokens: 1,
    kv_transfer_params: { remote_kv_source: NAMED },
  });
  for (const prompt of ["a", "b", "c"]) await sourceOf({ prompt });
  expect(added.seen.filter(({ path }) => path === "/v1/completions")).toHaveLength(1);
  if (held !== undefined) void prefillOk(held);
  await expect.poll(states).toEqual(["up", "up"]);

  await prefill.drain({ url: added.url });
  const copies = () => pool.seen.filter(({ path }) => path === "/copies").map(({ json }) => json);
  expect(copies()).toEqual([{ peer: "127.0.0.1:7777" }]);
});

test("a pool that ends is not named, and requests go on", async () => {
  const { sourceOf, becomes, pool } = await withPool(poolContent(3));
  await becomes({ unused: null });
  await pool.close();
  await becomes({ unused: expect.stringContaining("cannot be read") });
  expect(await sourceOf({ prompt: POOL_PROMPT })).toBeUndefined();
});

const JSON_HEAD = { "content-type": "application/json" };

const DAMAGED: readonly (readonly [string, Answer, RegExp])[] = [
  ["says nothing", () => {}, /has not answered yet/],
  [
    "stops in an answer",
    ({ response }) => void response.writeHead(200, JSON_HEAD).write("{"),
    /yet/,
  ],
  [
    "breaks off an answer",
    ({ response }) => {
      response.writeHead(200, { ...JSON_HEAD, "content-length": 1000 }).write("{");
      setTimeout(() => response.destroy(), 20);
    },
    /cannot be read/,
  ],
  [
    "sends an answer without an end",
    ({ response, dropped }) => {
      response.writeHead(200, JSON_HEAD);
      const timer = setInterval(() => response.write(" ".repeat(4096)), 1);
      void dropped.then(() => clearInterval(timer));
    },
    /cannot be read/,
  ],
  [
    "names blocks that are none",
    ({ response }) => sendJson(response, { ...poolContent(3), changes: ["+", "*x"] }),
    /cannot be read/,
  ],
];

test.each(DAMAGED)(
  "a pool that %s: requests go on, and nothing is left",
  async (_, answer, why) => {
    let [isDamaged, dropped] = [true, 0];
    const pool = await upstream((seen) => {
      void seen.dropped.then(() => {
        dropped += 1;
      });
      if (isDamaged) return answer(seen);
      sendJson(seen.response, poolContent(3));
    });
    const clock = manualClock();
    const { proxy, p, ask } = await runPair({}, { kvSources: { pools: [pool.url] }, clock });
    const unused = () => proxy.status().kv_pools[0]?.unused;
    await pool.request(0);
    await expect.poll(unused).toMatch(why);
    expect((await ask({ prompt: POOL_PROMPT })).status).toBe(200);
    expect(p.seen.at(-1)?.body).not.toContain("remote_kv_source");

    isDamaged = false;
    const answered = async () => {
      clock.advance(3000);
      await new Promise((resolve) => setTimeout(resolve, 20));
      return unused();
    };
    await expect.poll(answered).toBeNull();
    isDamaged = true;
    const asked = pool.seen.length;
    clock.advance(500);
    await expect.poll(() => pool.seen.length).toBe(asked + 1);
    await proxy.close({ graceMs: 0 });
    const ended = pool.seen.filter(({ response }) => response.writableFinished).length;
    await expect.poll(() => dropped + ended).toBe(pool.seen.length);
    clock.advance(60_000);
    expect(clock.pending()).toBe(0);
  },
);

test("a pool whose pages never end is asked no more often than others", async () => {
  const { becomes, sourceOf, pool } = await withPool({ ...poolContent(3), more: true });
  await becomes({ unused: null, blocks: 3 });
  const before = pool.seen.length;
  expect(await sourceOf({ prompt: POOL_PROMPT })).toEqual(NAMED);
  await new Promise((resolve) => setTimeout(resolve, 600));
  expect(pool.seen.length - before).toBeLessThan(4);
});

test("a pool that does not answer holds up a leaving instance for half a minute", async () => {
  const clock = manualClock();
  const pool = await upstream(({ response, path }) => {
    if (path !== "/copies") sendJson(response, poolContent(3));
  });
  const { p, proxy } = await runFleet([prefillOk, prefillOk], [decodeOk], {
    kvSources: { pools: [pool.url], tierPort: 7777 },
    clock,
  });
  let hasLeft = false;
  const left = proxy.instances.prefill.drain({ url: p[0].url }).then(() => {
    hasLeft = true;
  });
  await expect.poll(() => pool.seen.map(({ path }) => path)).toContain("/copies");
  clock.advance(29_000);
  await new Promise((resolve) => setTimeout(resolve, 20));
  expect(hasLeft).toBe(false);
  clock.advance(1000);
  await left;
});
