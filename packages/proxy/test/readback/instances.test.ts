import type { Answer } from "@kv/testing/http/fake-upstream";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test } from "vitest";
import { isRelease } from "../support/releases.js";
import { breaks, post, runFleet } from "../support/set-up.js";
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
    const { prefill, decode } = turns;
    const { url, p } = await runFleet([prefill, prefill], [decode], { readback: {} });
    // Both have answered, so their tensor-parallel sizes are known.
    await turn(url, LONG, { cache_salt: "other" });
    const next = await turn(url, LONG);
    expect(p.map(({ seen }) => seen.length)).toEqual([1, 1]);
    await p[dead]?.close();
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
  const { log, logged } = recordedLog();
  const { url } = await runFleet([turns.prefill], [decode, decode], {
    readback: {},
    log,
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
  expect(logged("request-done")).toMatchObject([
    { restarts: undefined, readback: "no-match", readbackTokens: undefined },
    { restarts: 1, readback: "lost", readbackTokens: undefined },
    { restarts: undefined, readback: "used", readbackTokens: next.length + 15 },
  ]);
});

test("a sidecar keeps what its D holds, and gives it to the P that the header names", async () => {
  const turns = new TurnServers();
  const { url, p, proxy } = await runFleet([turns.prefill, turns.prefill], [turns.decode], {
    prefillers: [],
    sidecar: { allow: ["127.0.0.0/8"] },
    readback: {},
  });
  let prompt = LONG;
  for (const one of [...p, ...p, ...p]) {
    const body = { model: "m", prompt, max_tokens: 16 };
    const headers = { "x-prefiller-host-port": new URL(one.url).host };
    const answer = await post(url + COMPLETIONS, body, { headers });
    const { choices } = (await answer.json()) as { choices: [{ text: string }] };
    expect([choices[0].text]).toEqual(expected(body));
    prompt = [...prompt, ...codes(`${choices[0].text} and more`)];
  }
  // The tensor-parallel size of the second P is not known before it has answered.
  expect(turns.counts.reads).toBe(4);
  expect(p.map(({ seen }) => seen.length)).toEqual([3, 3]);
  expect(turns.wrong).toEqual([]);
  await proxy.close();
  expect(turns.pinned.size).toBe(0);
});

test("a D that holds more than its budget gets no request that another D can take", async () => {
  const turns = new TurnServers();
  turns.cacheBlocks = 300;
  // Nobody tells D to free anything.
  const prefill: Answer = (seen) => (isRelease(seen) ? breaks : turns.prefill)(seen);
  // One that is never full.
  const large: Answer = (seen) =>
    seen.path === "/metrics"
      ? void seen.response.end(
          'vllm:cache_config_info{block_size="16",num_gpu_blocks="100000"} 1\n',
        )
      : turns.decode(seen);
  const fleet = await runFleet([prefill], [turns.decode, large], {
    readback: { cachePercent: 10 },
  });
  const { url, proxy } = fleet;
  const [small] = fleet.d;
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
  const { url, proxy } = await runFleet([turns.prefill], [decode], { readback: {} });
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
