import { silentLog } from "@kv/interface";
import type { Answer } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { post, runProxy, upstream } from "../support/set-up.js";
import { ask, expected } from "./client.js";
import { TurnServers } from "./turn-servers.js";

// Several P's and D's, and a sidecar. Prompts are token ids, so nobody renders them.

const COMPLETIONS = "/v1/completions";
const codes = (text: string) => Array.from(text, (one) => one.codePointAt(0) ?? 0);
const LONG = codes(
  "a prompt that is longer than the least number of tokens which are worth keeping at D. ",
);

/** Sends a turn. Returns the prompt of the next one. */
async function turn(url: string, prompt: readonly number[], more: object = {}): Promise<number[]> {
  const body = { model: "m", prompt, ...more };
  const [answer = ""] = await ask(url, COMPLETIONS, body);
  expect([answer]).toEqual(expected(body));
  return [...prompt, ...codes(`${answer} and more`)];
}

test.each([0, 1])(
  "where P %i of two cannot be reached, the other P reads the turn",
  async (dead) => {
    const turns = new TurnServers();
    const prefillers = [await upstream(turns.prefill), await upstream(turns.prefill)];
    const decoder = await upstream(turns.decode);
    const urls = prefillers.map(({ url }) => url);
    const { url } = await runProxy({ prefillers: urls, decoders: [decoder.url], readback: {} });
    // Both have answered, so their tensor-parallel sizes are known.
    await turn(url, LONG, { cache_salt: "other" });
    const next = await turn(url, LONG);
    expect(prefillers.map(({ seen }) => seen.length)).toEqual([1, 1]);
    await prefillers[dead]?.close();
    await turn(url, await turn(url, next));
    expect(turns.counts.reads).toBe(2);
    expect(turns.wrong).toEqual([]);
  },
);

test("a D that fails when P has read the turn: the request begins again with P, and the answer is right", async () => {
  const turns = new TurnServers();
  let fails = false;
  const decode: Answer = (seen) => {
    if (!fails || seen.path !== COMPLETIONS) return turns.decode(seen);
    fails = false;
    return void seen.response.destroy();
  };
  const prefiller = await upstream(turns.prefill);
  const decoders = [await upstream(decode), await upstream(decode)].map(({ url }) => url);
  const logged: unknown[] = [];
  const { url } = await runProxy({
    prefillers: [prefiller.url],
    decoders,
    readback: {},
    log: {
      ...silentLog,
      info: (event, { restarts, readback, readbackTokens } = {}) =>
        event === "request-done" && logged.push([restarts, readback, readbackTokens]),
    },
  });
  const next = await turn(url, LONG);
  const { legs } = turns.counts;
  fails = true;
  const last = await turn(url, next);
  // One leg reads the turn, the other one computes the prompt.
  expect([turns.counts.legs - legs, turns.counts.reads]).toEqual([2, 1]);
  await turn(url, last);
  expect(turns.counts.reads).toBe(2);
  expect(turns.wrong).toEqual([]);
  // What was read was lost with the D that failed.
  expect(logged).toEqual([
    [undefined, "no-match", undefined],
    [1, "lost", undefined],
    [undefined, "used", next.length + 15],
  ]);
});

test("a sidecar keeps what its D holds, and gives it to the P that the header names", async () => {
  const turns = new TurnServers();
  const prefillers = [await upstream(turns.prefill), await upstream(turns.prefill)];
  const decoder = await upstream(turns.decode);
  const { url, proxy } = await runProxy({
    decoders: [decoder.url],
    sidecar: { allow: ["127.0.0.0/8"] },
    readback: {},
  });
  let prompt = LONG;
  for (const one of [...prefillers, ...prefillers, ...prefillers]) {
    const body = { model: "m", prompt, max_tokens: 16 };
    const headers = { "x-prefiller-host-port": new URL(one.url).host };
    const answer = await post(url + COMPLETIONS, body, { headers });
    const { choices } = (await answer.json()) as { choices: [{ text: string }] };
    expect([choices[0].text]).toEqual(expected(body));
    prompt = [...prompt, ...codes(`${choices[0].text} and more`)];
  }
  // The tensor-parallel size of the second P is not known before it has answered.
  expect(turns.counts.reads).toBe(4);
  expect(prefillers.map(({ seen }) => seen.length)).toEqual([3, 3]);
  expect(turns.wrong).toEqual([]);
  await proxy.close();
  expect(turns.pinned.size).toBe(0);
});

test("a D that holds more than its budget gets no request that another D can take", async () => {
  const turns = new TurnServers();
  turns.cacheBlocks = 300;
  // Nobody tells D to free anything.
  const prefiller = await upstream((seen) =>
    seen.json.use_beam_search === true ? void seen.response.destroy() : turns.prefill(seen),
  );
  // One that is never full.
  const large: Answer = (seen) =>
    seen.path === "/metrics"
      ? void seen.response.end(
          'vllm:cache_config_info{block_size="16",num_gpu_blocks="100000"} 1\n',
        )
      : turns.decode(seen);
  const [small, other] = [await upstream(turns.decode), await upstream(large)];
  const { url, proxy } = await runProxy({
    prefillers: [prefiller.url],
    decoders: [small.url, other.url],
    readback: { cachePercent: 10 },
  });
  const isCrowded = () =>
    proxy.status().readback?.some(({ blocks, budget_blocks }) => blocks > budget_blocks) === true;
  let users = 0;
  const next = async () => {
    users += 1;
    await turn(url, LONG, { cache_salt: `${users}` });
    await expect.poll(() => turns.pinned.size).toBe(users);
  };
  while (!isCrowded() && users < 30) await next();
  expect(isCrowded()).toBe(true);
  const before = small.seen.length;
  for (let more = 0; more < 6; more += 1) await next();
  expect(small.seen.length).toBe(before);
  expect(turns.wrong).toEqual([]);
});

test("a client that leaves when D has ended the request, and before the names have come: D holds the blocks, and the next turn is computed", async () => {
  const turns = new TurnServers();
  const left = new AbortController();
  const decode: Answer = async (seen) => {
    const isFirst = seen.path === COMPLETIONS && !left.signal.aborted;
    if (isFirst) {
      left.abort();
      await new Promise((resolve) => seen.response.once("close", resolve));
    }
    return turns.decode(seen);
  };
  const [prefiller, decoder] = [await upstream(turns.prefill), await upstream(decode)];
  const { url, proxy } = await runProxy({
    prefillers: [prefiller.url],
    decoders: [decoder.url],
    readback: {},
  });
  const body = { model: "m", prompt: LONG };
  await expect(post(url + COMPLETIONS, body, { signal: left.signal })).rejects.toThrow();
  await expect.poll(() => turns.pinned.size).toBe(1);
  const [lost] = turns.pinned.keys();
  await turn(url, [...LONG, ...codes(`${expected(body)[0]} and more`)]);
  expect(turns.counts.reads).toBe(0);
  await proxy.close();
  expect([...turns.pinned.keys()]).toEqual([lost]);
  expect(turns.wrong).toEqual([]);
});
