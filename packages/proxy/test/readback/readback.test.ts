import { systemClock } from "@kv/interface";
import { startSideChannel } from "@kv/testing/http/side-channel";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, onTestFinished, test, vi } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import { post, runFleet, runProxy, upstream } from "../support/set-up.js";
import { ask, expected } from "./client.js";
import { TurnServers } from "./turn-servers.js";

type Fields = Record<string, unknown>;
const CHAT = "/v1/chat/completions";
const COMPLETIONS = "/v1/completions";
const LONG =
  "a system prompt that is longer than the least number of tokens which are worth keeping at D. ";

async function servers(readback: Fields = {}, more: ProxyOptions = {}) {
  const turns = new TurnServers();
  const { p, d, ...running } = await runFleet([turns.prefill], [turns.decode], {
    readback,
    admin: { port: 0 },
    ...more,
  });
  const metric = async (name: string) => {
    const line = (await running.metrics()).split("\n").find((one) => one.startsWith(name));
    return line === undefined ? undefined : Number(line.split(" ").at(-1));
  };
  return { turns, metric, ...running };
}

/** The body of a further turn of a chat. */
const further = (messages: readonly Fields[], more: Fields = {}) => ({
  model: "m",
  messages: [...messages, { role: "user", content: "?" }],
  ...more,
});

/** Asks, and compares the answer with what one engine would say. Returns it. */
async function asked(url: string, path: string, body: Fields): Promise<string[]> {
  const answer = await ask(url, path, body);
  expect(answer).toEqual(expected(body));
  return answer;
}

/** A chat of `count` turns. Returns its messages. */
async function converse(url: string, count: number, more: Fields = {}): Promise<Fields[]> {
  const messages: Fields[] = [{ role: "system", content: LONG }];
  for (let turn = 1; turn <= count; turn += 1) {
    messages.push({ role: "user", content: `question ${turn}` });
    const [answer] = await asked(url, CHAT, { model: "m", messages, ...more });
    messages.push({ role: "assistant", content: answer });
  }
  return messages;
}

test.each([{ stream: true, stream_options: { include_usage: true } }, {}])(
  "from the second turn on, P computes only what is new: %j",
  async (more) => {
    const { turns, url, proxy, metric } = await servers();
    const messages = await converse(url, 4, more);
    expect(turns.wrong).toEqual([]);
    expect(turns.counts.reads).toBe(3);
    // The prompt of the last turn, its last token, and what three turns have added.
    const prompt = [...expected({ messages }).join("")].length;
    expect(prompt).toBeGreaterThan(0);
    const length = LONG.length + "<system><user>question 1<assistant>".length;
    expect(turns.counts.computed).toBe(length + 3 * "x<user>question 2<assistant>".length);
    expect(await metric("kv_proxy_readback_used_total")).toBe(3);
    expect(await metric("kv_proxy_readback_tokens_total")).toBe(turns.counts.read);
    expect(await metric("kv_proxy_readback_objects")).toBe(1);
    expect(await metric("kv_proxy_readback_pinned_blocks")).toBe(turns.pinnedBlocks);
    expect(proxy.status().readback).toMatchObject([{ objects: 1, blocks: turns.pinnedBlocks }]);
    // Nobody would use it any more.
    await proxy.close();
    expect(turns.pinnedBlocks).toBe(0);
    expect(turns.counts.released).toBe(1);
  },
);

test.each([true, false])(
  "the log says how many tokens of the prompt P had, where it says so (%s) and where it does not",
  async (tellsCached) => {
    const { log, logged } = recordedLog();
    const { turns, url } = await servers({}, { log });
    turns.tellsCached = tellsCached;
    await converse(url, 2);
    await vi.waitFor(() => expect(logged("request-done")).toHaveLength(2));
    const { read } = turns.counts;
    expect(logged("request-done")).toMatchObject([
      { cachedTokens: tellsCached ? 0 : undefined },
      { cachedTokens: read, readback: "used", readbackTokens: read },
    ]);
  },
);

test("completions of text and of token ids are read too, and the ids go to both legs", async () => {
  const { turns, url } = await servers();
  const text = { model: "m", prompt: LONG };
  const [answer = ""] = await ask(url, COMPLETIONS, text);
  const longer = { model: "m", prompt: `${LONG}${answer} and more`, return_token_ids: true };
  const [second = ""] = await asked(url, COMPLETIONS, longer);
  const ids = {
    model: "m",
    prompt: [...`${longer.prompt}${second}!`].map((one) => one.codePointAt(0)),
  };
  await asked(url, COMPLETIONS, ids);
  expect(turns.wrong).toEqual([]);
  expect(turns.counts.reads).toBe(2);
});

test("regenerated, an answer's KV is not read: the prompt is shorter than it", async () => {
  const { turns, url } = await servers();
  const messages = await converse(url, 2);
  const before = turns.counts.reads;
  await asked(url, CHAT, { model: "m", messages: messages.slice(0, -1), seed: 7 });
  expect(turns.counts.reads).toBe(before);
  expect(turns.wrong).toEqual([]);
});

test("copies, images, stop strings and short answers leave nothing pinned", async () => {
  const { turns, url } = await servers();
  const messages = [{ role: "user", content: LONG }];
  const image = [
    {
      role: "user",
      content: [
        { type: "text", text: LONG },
        { type: "image_url", image_url: {} },
      ],
    },
  ];
  await ask(url, CHAT, { model: "m", messages, n: 3 });
  await ask(url, CHAT, { model: "m", messages: image });
  await ask(url, CHAT, { model: "m", messages: image, stream: true });
  await ask(url, CHAT, { model: "m", messages: [{ role: "user", content: "hi" }] });
  for (const stop of "abc") await ask(url, CHAT, { model: "m", messages, stop, cache_salt: stop });
  await vi.waitFor(() => expect(turns.pinnedBlocks).toBe(0));
  expect(turns.wrong).toEqual([]);
});

test("an object is used once: of two turns that go on from it at once, one is computed", async () => {
  const { turns, url } = await servers();
  const messages = await converse(url, 1);
  await Promise.all(
    ["one", "two", "three"].map((content) =>
      asked(url, CHAT, { model: "m", messages: [...messages, { role: "user", content }] }),
    ),
  );
  expect(turns.counts.reads).toBe(1);
  expect(turns.wrong).toEqual([]);
});

test.each(["500", "hang", "break"] as const)(
  "where P cannot read a turn (%s), the prompt is computed, and a P that does not answer gets none for a while",
  async (failure) => {
    const { turns, url, metric } = await servers({ timeoutMs: 200 });
    const messages = await converse(url, 1);
    turns.failures.push(failure);
    for (const content of ["second", "third"]) {
      messages.push({ role: "user", content });
      const [answer] = await asked(url, CHAT, { model: "m", messages, stream: true });
      messages.push({ role: "assistant", content: answer });
    }
    expect(turns.wrong).toEqual([]);
    expect(await metric('kv_proxy_readback_refused_total{reason="failed"}')).toBe(1);
    // A P that has answered may read the next one. One that breaks off is left out for a while, and
    // there is no other one to render the next prompt.
    expect(turns.counts.reads).toBe(failure === "500" ? 1 : 0);
    const next = failure === "break" ? "no-ids" : "no-prefill";
    if (failure !== "500")
      expect(await metric(`kv_proxy_readback_refused_total{reason="${next}"}`)).toBeGreaterThan(0);
    // P has answered, so D frees the blocks. Else they wait: P may be reading.
    if (failure === "500") await vi.waitFor(() => expect(turns.counts.released).toBe(1));
    else expect(turns.pinnedBlocks).toBeGreaterThan(0);
  },
);

test("a P that died while it read a turn reads the next one as soon as it is back", async () => {
  const timeouts = { coolDownMs: 1, maxCoolDownMs: 1 };
  const { turns, url } = await servers({}, { timeouts });
  const messages = await converse(url, 1);
  turns.failures.push("break");
  for (const content of ["second", "third", "fourth"]) {
    messages.push({ role: "user", content });
    const [answer] = await asked(url, CHAT, { model: "m", messages });
    messages.push({ role: "assistant", content: answer });
  }
  expect(turns.wrong).toEqual([]);
  expect(turns.counts.reads).toBeGreaterThan(0);
});

test("what was of a D before its restart is not read", async () => {
  const { turns, url, metric } = await servers();
  const [one, two] = [
    await converse(url, 1, { cache_salt: "1" }),
    await converse(url, 1, { cache_salt: "2" }),
  ];
  turns.restartDecoder();
  // The first answer of the new engine tells it.
  await converse(url, 1, { cache_salt: "3" });
  for (const [salt, messages] of [one, two].entries())
    await asked(url, CHAT, further(messages, { cache_salt: `${salt + 1}` }));
  expect(turns.counts.reads).toBe(0);
  expect(turns.wrong).toEqual([]);
  expect(await metric("kv_proxy_readback_objects")).toBe(3);
});

test.each([
  ["one engine id", "d-1", 0],
  ["two engine ids", "d-2", 2],
])("two D's with %s: a turn is read where its id names one D", async (_, otherId, reads) => {
  const turns = new TurnServers();
  const side = async (engineId: string) => {
    const { port, close } = await startSideChannel(() => ({ engineId, vllmVersion: "0.33.0" }));
    onTestFinished(close);
    return { host: "127.0.0.1", port };
  };
  const [own, other] = [await upstream(turns.decode), await upstream(() => {})];
  const { url, proxy } = await runProxy({
    prefillers: [(await upstream(turns.prefill)).url],
    decoders: [
      { url: own.url, kv: await side("d-1") },
      { url: other.url, kv: await side(otherId) },
    ],
    readback: {},
    pairing: { mode: "lenient" },
  });
  // It serves nothing.
  proxy.instances.decode.list()[1]?.drain(true);
  const engineIds = () => proxy.status().decoders.map(({ pairing }) => pairing?.engine_id);
  await expect.poll(engineIds).toEqual(["d-1", otherId]);
  await converse(url, 3);
  expect(turns.counts.reads).toBe(reads);
  expect(turns.wrong).toEqual([]);
});

test("turns hold at most their share of D: the one that waits for longest is given back", async () => {
  const { turns, url, metric } = await servers({ cachePercent: 10 });
  turns.cacheBlocks = 300;
  for (let user = 0; user < 12; user += 1) {
    await converse(url, 1, { cache_salt: `${user}` });
    await vi.waitFor(() => expect(turns.pinnedBlocks).toBeLessThanOrEqual(30));
  }
  expect(turns.pinnedBlocks).toBeGreaterThan(20);
  expect(await metric("kv_proxy_readback_budget_blocks")).toBe(30);
  const before = turns.counts.reads;
  await converse(url, 2, { cache_salt: "12" });
  expect(turns.counts.reads).toBe(before + 1);
  expect(turns.wrong).toEqual([]);
});

test("nothing is kept at a D whose cache is of unknown size, or when it is too small", async () => {
  const { turns, url, metric } = await servers({ cachePercent: 1 });
  turns.cacheBlocks = 300;
  await converse(url, 2);
  await vi.waitFor(() => expect(turns.pinnedBlocks).toBe(0));
  expect(turns.counts.reads).toBe(0);
  expect(await metric('kv_proxy_readback_refused_total{reason="budget"}')).toBe(2);
  turns.hasMetrics = false;
  turns.restartDecoder();
  await converse(url, 2);
  expect(await metric('kv_proxy_readback_refused_total{reason="capacity"}')).toBe(2);
});

type Ids = readonly number[];

test.each([
  ["several groups of layers", (ids: Ids) => ({ remote_block_ids: [ids, [9999]] })],
  ["a block more than the tokens need", (ids: Ids) => ({ remote_block_ids: [[...ids, 9999]] })],
  ["pipeline stages", () => ({ pp_size: 2 })],
  ["decode context parallelism", () => ({ dcp_size: 2 })],
  ["push", () => ({ transfer_mode: "push" })],
  ["no end of the lease", () => ({ remote_blocks_expiry_time: null })],
])(
  "a D with %s is not read: the reason is counted, and its blocks are given back",
  async (_, says) => {
    const { turns, url, metric } = await servers();
    turns.decodeSays = says;
    await converse(url, 3);
    expect(turns.counts.reads).toBe(0);
    expect(turns.wrong).toEqual([]);
    expect(await metric('kv_proxy_readback_refused_total{reason="shape"}')).toBe(3);
    await vi.waitFor(() => expect(turns.pinnedBlocks).toBe(0));
    expect(turns.counts.released).toBe(3);
  },
);

const KV_PEER = {
  kv_peer: { incarnation: "i", generation: 1, capability: "AAAAAAAAAAAAAAAAAAAAAA" },
};

test.each([
  ["a vLLM", {}, {}, 0],
  ["a vLLM, as P alone is an engine of this project", KV_PEER, {}, 0],
  ["a vLLM, as D alone is an engine of this project", {}, KV_PEER, 0],
  ["an engine of this project, as D is", KV_PEER, KV_PEER, 1],
])(
  "a P with another tensor-parallel size than D reads only from its own kind: %s",
  async (...given) => {
    const [, prefillSays, decodeSays, reads] = given;
    const { turns, url, metric } = await servers();
    turns.prefillSays = { ...prefillSays, tp_size: 2 };
    turns.decodeSays = () => decodeSays;
    const messages = await converse(url, 1);
    await asked(url, CHAT, further(messages));
    expect(turns.counts.reads).toBe(reads);
    expect(turns.wrong).toEqual([]);
    expect(await metric('kv_proxy_readback_refused_total{reason="no-prefill"}')).toBe(
      1 - reads || undefined,
    );
  },
);

test.each([
  ["a P of this project", KV_PEER, 2],
  ["no P of vLLM", {}, 0],
] as const)(
  "turns of a context parallel D of this project are read by %s",
  async (_, prefillSays, reads) => {
    const { turns, url } = await servers();
    turns.prefillSays = prefillSays;
    turns.decodeSays = (blocks) => {
      const spread = blocks.slice(0, Math.ceil(blocks.length / 2));
      return { ...KV_PEER, dcp_size: 2, remote_block_ids: [spread] };
    };
    await converse(url, 3);
    expect(turns.counts.reads).toBe(reads);
    expect(turns.wrong).toEqual([]);
  },
);

test("an object that no P fits stays for one that does", async () => {
  const { turns, url, proxy } = await servers();
  const messages = await converse(url, 1);
  const [p] = proxy.instances.prefill.list();
  if (p === undefined) throw new Error("there is no P");
  const own = vi.spyOn(p, "kv", "get").mockReturnValue({ tpSize: 2 });
  await asked(url, CHAT, further(messages));
  expect(turns.counts.reads).toBe(0);
  own.mockRestore();
  await asked(url, CHAT, further(messages));
  expect(turns.counts.reads).toBe(1);
});

test("a client that leaves while P reads leaves the turn to nobody", async () => {
  const { turns, url, metric } = await servers();
  const messages = await converse(url, 1);
  turns.failures.push("hang");
  const body = further(messages);
  const abort = new AbortController();
  const left = post(`${url}${CHAT}`, body, { signal: abort.signal });
  await vi.waitFor(() => expect(turns.failures).toEqual([]));
  abort.abort();
  await expect(left).rejects.toThrow();
  await asked(url, CHAT, body);
  expect(turns.counts.reads).toBe(0);
  expect(await metric("kv_proxy_readback_objects")).toBe(1);
});

test("a closed proxy sends nothing for what a P may have been reading", async () => {
  const waiting = new Set<number>();
  let serial = 0;
  const system = systemClock();
  const clock = {
    ...system,
    setTimer(run: () => void, ms: number) {
      const timer = system.setTimer(run, ms);
      serial += 1;
      const number = serial;
      // The time after which a P has surely ended.
      if (ms === 30_000) waiting.add(number);
      const cancel = () => {
        waiting.delete(number);
        timer.cancel();
      };
      return { cancel };
    },
  };
  const { turns, url, proxy } = await servers({ timeoutMs: 200 }, { clock });
  const messages = await converse(url, 1);
  turns.failures.push("hang");
  await asked(url, CHAT, further(messages));
  expect(waiting.size).toBe(1);
  await proxy.close();
  expect(waiting.size).toBe(0);
});

test("readback is a setting of pull", async () => {
  await expect(
    runProxy({ prefillers: ["p:1"], decoders: ["d:1"], mode: "push", readback: {} }),
  ).rejects.toThrow("readback is set and mode is push");
});
