import type { ProxyOptions } from "@kv/proxy";
import { recordedLog } from "@kv/testing/recorded-log";
import { beforeAll, describe, expect, test } from "vitest";
import { parsePrometheusText } from "../../packages/peer/src/http/prometheus-text.js";
import {
  ask,
  complete,
  completionBody,
  freshId,
  plain,
  type Tokens,
  tokensOf,
} from "./completion.js";
import { expired, promptVariant, untilFreed, usageNow } from "./held-blocks.js";
import { proxyPair } from "./proxy-pair.js";
import type { VllmServer } from "./server.js";
import { sleep, until } from "./until.js";

// kv-proxy --readback in front of plain vLLM 0.33: what P computes, by its own metrics; each hazard
// of a reference; what D holds at the end.

const BLOCK_TOKENS = 32;
/** Whatever is free earlier was notified. */
const TTL_SECONDS = 480;
/** As `decoder_kv_blocks_ttl` at a D on which objects expire. */
const SHORT_TTL_SECONDS = 20;
const READBACK = {
  bidirectional_kv_xfer: true,
  // A P with a prefix cache computes up to so many tokens of the last answer again.
  kv_recompute_threshold: BLOCK_TOKENS,
  decoder_kv_blocks_ttl: TTL_SECONDS,
};
const CHAT = "/v1/chat/completions";
const OUTPUT_TOKENS = 40;
/** A chat's answer has these tokens, but not their text, so the next prompt would have others. */
const NO_SPECIAL = { logit_bias: { 0: -100, 1: -100 } };

interface Turn {
  readonly salt: string;
  readonly prompt: Tokens;
  readonly output: Tokens;
}

describe("0.33: kv-proxy --readback", () => {
  const base = { mode: "pull", readback: { timeoutMs: 60_000 } } as const;
  const pair = proxyPair(
    { version: "0.33", mode: "pull" },
    { base, args: ["--enable-scale-out"], extra: READBACK, hasWholeWords: true },
  );
  const other: { d?: VllmServer } = {};

  async function reading(more: Partial<ProxyOptions> = {}) {
    const { log, logged } = recordedLog();
    const opened = await pair.proxied({ ...more, log });
    const records = () => logged("request-done");
    const last = () => records().at(-1)?.["readback"];
    const readbacks = () => records().map(({ readback }) => readback);
    return { ...opened, logged, records, readbacks, last };
  }

  const freed = (server: VllmServer) => untilFreed(server, 0);
  /** None was free because D's time was over. */
  async function nothingIsPinned() {
    await freed(pair.d);
    await freed(pair.p);
    expect(await expired(pair.d)).toBe(0);
  }

  const alone = (prompt: Tokens, maxTokens = OUTPUT_TOKENS) =>
    plain(pair.d.url, prompt, maxTokens, { salt: freshId() });

  /** Its tokens must be those of one engine. */
  async function turn(
    url: string,
    prompt: Tokens,
    salt: string = freshId(),
    maxTokens = OUTPUT_TOKENS,
  ): Promise<Turn> {
    const output = await plain(url, prompt, maxTokens, { salt });
    expect(output).toEqual(await alone(prompt, maxTokens));
    return { salt, prompt, output };
  }
  const after = ({ prompt, output }: Turn, added = 20) => [
    ...prompt,
    ...output,
    ...promptVariant(added, prompt.length),
  ];

  beforeAll(async () => {
    // On a busy machine the first handshake may take longer than vLLM allows.
    const { url, last, close } = await reading();
    for (let attempt = 1; last() !== "used" && attempt <= 4; attempt += 1) {
      const [salt, prompt] = [freshId(), promptVariant(100, attempt)];
      const first = { salt, prompt, output: await plain(url, prompt, 8, { salt }) };
      await plain(url, after(first), 8, { salt });
    }
    expect(last()).toBe("used");
    await close();
    await nothingIsPinned();
  });

  test("a turn that nobody goes on from is given back by a request that P refuses", async () => {
    const { url, proxy, logged, close } = await reading();
    await turn(url, promptVariant(100, 3));
    await until(() => proxy.status().readback?.[0]?.objects === 1, "the proxy has D's object");
    expect(await usageNow(pair.d)).toBeGreaterThan(0);
    await close();
    expect(logged("release-sent").map(({ outcome }) => outcome)).toEqual(["refused"]);
    await nothingIsPinned();
  });

  test.each([false, true])(
    "from the second turn on, P computes what is new and less than a block (stream %s)",
    async (stream) => {
      const { url, last } = await reading();
      const salt = freshId();
      let ended: Turn | undefined;
      for (let count = 1; count <= 6; count += 1) {
        const prompt = ended === undefined ? promptVariant(203, 5) : after(ended, 30 + 7 * count);
        const [expectedTokens, before] = [await alone(prompt), await promptTokens(pair.p)];
        const body = completionBody(prompt, OUTPUT_TOKENS);
        const output = stream
          ? await streamed(url, { ...body, cache_salt: salt })
          : tokensOf(await complete(url, body, { salt }));
        const computed = (await promptTokens(pair.p)).local_compute - before.local_compute;
        expect(output).toEqual(expectedTokens);
        const kept = ended === undefined ? 0 : ended.prompt.length + ended.output.length - 1;
        const fresh = prompt.length - kept;
        if (ended !== undefined) expect(last()).toBe("used");
        expect(computed).toBeGreaterThan(0);
        expect(computed).toBeLessThan(fresh + BLOCK_TOKENS);
        ended = { salt, prompt, output };
      }
    },
  );

  test.each([{}, { stream: true, stream_options: { include_usage: true } }])(
    "a chat of four turns: %j",
    async (more) => {
      const { url, readbacks } = await reading();
      const salt = freshId();
      const messages = [{ role: "system", content: wordsOf(promptVariant(90, 7)) }];
      for (let count = 1; count <= 4; count += 1) {
        messages.push({ role: "user", content: wordsOf(promptVariant(20 + count, 60 + count)) });
        const body = {
          model: "tiny",
          messages,
          max_tokens: 24,
          temperature: 0,
          ...NO_SPECIAL,
          ...more,
        };
        const content = await chat(url, { ...body, cache_salt: salt });
        expect(content).toBe(await chat(pair.d.url, { ...body, cache_salt: freshId() }));
        messages.push({ role: "assistant", content });
      }
      expect(readbacks()).toEqual(["no-match", "used", "used", "used"]);
    },
  );

  const next = promptVariant(20, 77);
  test.each<[string, string, (ended: Turn) => Tokens]>([
    ["the same prompt again", "no-match", ({ prompt }) => prompt],
    [
      "a begin of what D holds",
      "no-match",
      ({ prompt, output }) => [...prompt, ...output.slice(0, 5)],
    ],
    [
      "exactly what D holds",
      "no-match",
      ({ prompt, output }) => [...prompt, ...output.slice(0, -1)],
    ],
    [
      "all that D holds and another last token",
      "used",
      ({ prompt, output }) => [...prompt, ...output.slice(0, -1), 20],
    ],
    [
      "the last five tokens left out",
      "no-match",
      ({ prompt, output }) => [...prompt, ...output.slice(0, -5), ...next],
    ],
    [
      "one token changed",
      "no-match",
      ({ prompt, output }) => [...prompt.with(60, 20), ...output, ...next],
    ],
    [
      "the first token changed",
      "no-match",
      ({ prompt, output }) => [...prompt.with(0, 20), ...output, ...next],
    ],
    ["a token put in", "no-match", ({ prompt, output }) => [...prompt, 20, ...output, ...next]],
  ])("a further turn with %s: right, and %s", async (_, readback, promptOf) => {
    const { url, last } = await reading();
    const ended = await turn(url, promptVariant(100, 11), freshId(), 16);
    await turn(url, promptOf(ended), ended.salt, 8);
    expect(last()).toBe(readback);
  });

  test.each<[string, string, number, Partial<ProxyOptions>, string | undefined]>([
    ["with another salt is computed", "no-match", 0, {}, freshId()],
    [
      "after the time that is known of D is computed",
      "no-match",
      1100,
      { readback: { ttlMs: 1000 } },
      undefined,
    ],
  ])("a further turn %s", async (_, readback, afterMs, settings, salt) => {
    const { url, last } = await reading(settings);
    const ended = await turn(url, promptVariant(100, 12), freshId(), 16);
    await sleep(afterMs);
    await turn(url, after(ended), salt ?? ended.salt, 8);
    expect(last()).toBe(readback);
  });

  test("branches: one of four that go on from a turn reads it, at once and one after the other", async () => {
    const { url, readbacks } = await reading();
    const ended = await turn(url, promptVariant(110, 13), freshId(), 16);
    const branches = [1, 2, 3, 4].map((added) => after(ended, 20 * added));
    await Promise.all(branches.slice(0, 3).map((prompt) => turn(url, prompt, ended.salt, 8)));
    await turn(url, branches[3] ?? [], ended.salt, 8);
    expect(readbacks().sort()).toEqual([...Array(4).fill("no-match"), "used"]);
  });

  test.each<[string, string, object]>([
    ["two copies", "/v1/completions", { n: 2, temperature: 0.9, seed: 3 }],
    ["two prompts", "/v1/completions", { prompt: [promptVariant(80, 21), promptVariant(90, 22)] }],
    ["a stop string", "/v1/completions", { stop: ["t1", "t2", "t3"] }],
    [
      "stop_token_ids",
      "/v1/completions",
      { stop_token_ids: Array.from({ length: 500 }, (_, at) => at + 10) },
    ],
    ["echo", "/v1/completions", { echo: true }],
    ["prompt_logprobs", "/v1/completions", { prompt_logprobs: 1 }],
    ["a short answer of a short prompt", "/v1/completions", { prompt: promptVariant(20, 23) }],
    ["the Responses API", "/v1/responses", { input: wordsOf(promptVariant(80, 24)) }],
    [
      "the Responses API, a stream",
      "/v1/responses",
      { input: wordsOf(promptVariant(80, 25)), stream: true },
    ],
    [
      "the Messages API",
      "/v1/messages",
      { messages: [{ role: "user", content: wordsOf(promptVariant(80, 26)) }] },
    ],
  ])("%s: nothing is pinned when the proxy has closed", async (_, path, more) => {
    const { url, close } = await reading();
    const common = { model: "tiny", cache_salt: freshId(), temperature: 0 };
    const own =
      path === "/v1/responses"
        ? { max_output_tokens: 8 }
        : { prompt: promptVariant(100, 20), max_tokens: 8 };
    const answer = await ask(`${url}${path}`, { ...common, ...own, ...more });
    const text = await answer.text();
    expect(answer.status, text).toBe(200);
    await close();
    await nothingIsPinned();
  });

  test("turns hold at most their share of D's cache", async () => {
    const { url, proxy, close } = await reading({ readback: { cachePercent: 5 } });
    for (let user = 0; user < 8; user += 1) {
      await turn(url, promptVariant(150, 30 + user), freshId(), 8);
      const [status] = proxy.status().readback ?? [];
      expect(status?.blocks).toBeLessThanOrEqual((status?.budget_blocks ?? 0) + 5);
    }
    const [status] = proxy.status().readback ?? [];
    expect(status?.objects).toBeGreaterThan(1);
    expect(status?.objects).toBeLessThan(8);
    await close();
    await nothingIsPinned();
  });

  test("clients that leave while P reads, and while D answers: nothing stays pinned", async () => {
    const { url, close } = await reading();
    const body = (prompt: Tokens, salt: string) => ({
      ...completionBody(prompt, 60),
      stream: true,
      cache_salt: salt,
    });
    for (const [at, leavesAfterMs] of [5, 40, 80, 160, 320, 640].entries()) {
      const ended = await turn(url, promptVariant(400, 40 + at), freshId(), 8);
      const client = new AbortController();
      const asked = ask(`${url}/v1/completions`, body(after(ended), ended.salt), {
        signal: client.signal,
      });
      const read = asked.then((answer) => answer.text()).catch(() => {});
      await sleep(leavesAfterMs);
      client.abort();
      await read;
      await turn(url, after(ended), ended.salt, 8);
    }
    // What a P may have been reading is given back after half a minute.
    await sleep(31_000);
    await close();
    await nothingIsPinned();
  });

  test("P is restarted: its successor, without a prefix cache, reads the turns of before", async () => {
    const { url, last } = await reading();
    const first = await turn(url, promptVariant(203, 50));
    await pair.restart("p", { args: ["--no-enable-prefix-caching"] });
    const before = await promptTokens(pair.p);
    const prompt = after(first);
    const second = await turn(url, prompt, first.salt);
    const now = await promptTokens(pair.p);
    expect(last()).toBe("used");
    expect(now.external_kv_transfer - before.external_kv_transfer).toBe(242);
    expect(now.local_compute - before.local_compute).toBe(prompt.length - 242);
    await turn(url, after(second), second.salt);
    expect(last()).toBe("used");
  });

  describe("two D's", () => {
    beforeAll(async () => {
      other.d = await pair.start("d2");
    });
    const both = () => ({ decoders: [pair.d.url, other.d?.url ?? ""] });

    test("a conversation that goes from one D to the other: each turn is read from where the last one was", async () => {
      const { url, records, readbacks, close } = await reading(both());
      let ended = await turn(url, promptVariant(100, 60));
      for (let count = 0; count < 4; count += 1) ended = await turn(url, after(ended), ended.salt);
      expect(readbacks().slice(1)).toEqual(Array(4).fill("used"));
      expect(new Set(records().map(({ decode }) => decode)).size).toBe(2);
      await close();
      await nothingIsPinned();
      await freed(other.d ?? pair.d);
    });

    test("a D that is gone, and then back: its turns are computed, and right", async () => {
      const { url, records, last } = await reading(both());
      const turns = [];
      for (let count = 0; count < 8; count += 1)
        turns.push(await turn(url, promptVariant(100, 70 + count), freshId(), 16));
      const isLost = (at: number) => records()[at]?.["decode"] === pair.d.url;
      await pair.d.stop();
      const begunAt = Date.now();
      for (const [at, ended] of turns.slice(0, 4).entries()) {
        const prompt = after(ended);
        const output = await plain(url, prompt, 8, { salt: ended.salt });
        expect(output).toEqual(await plain(other.d?.url ?? "", prompt, 8, { salt: freshId() }));
        expect(last() === "used").toBe(!isLost(at));
      }
      expect(Date.now() - begunAt).toBeLessThan(120_000);
      await pair.restart("d", { extra: { ...READBACK, decoder_kv_blocks_ttl: SHORT_TTL_SECONDS } });
      for (const [at, ended] of turns.entries()) {
        if (at < 4) continue;
        await turn(url, after(ended), ended.salt, 8);
        expect(last() === "used").toBe(!isLost(at));
      }
    });

    test("an object whose time is over at D: P refuses it, and the prompt is computed", async () => {
      const { url, last } = await reading();
      const ended = await turn(url, promptVariant(100, 90), freshId(), 16);
      await sleep(1000 * SHORT_TTL_SECONDS);
      await turn(url, after(ended), ended.salt, 8);
      expect(last()).toBe("failed");
    });
  });
});

const wordsOf = (ids: Tokens) => ids.map((id) => `t${id}`).join(" ");

async function streamed(url: string, body: object): Promise<Tokens> {
  const answer = await ask(`${url}/v1/completions`, { ...body, stream: true });
  const text = await answer.text();
  expect(answer.status, text).toBe(200);
  return eventsOf(text).flatMap(tokensOf as (event: object) => Tokens);
}

async function chat(url: string, body: object): Promise<string> {
  const answer = await ask(url + CHAT, body);
  const text = await answer.text();
  expect(answer.status, text).toBe(200);
  type Choices = { choices: { message?: { content: string }; delta?: { content?: string } }[] };
  const events = (text.startsWith("data:") ? eventsOf(text) : [JSON.parse(text)]) as Choices[];
  return events
    .map(({ choices: [choice] }) => choice?.message?.content ?? choice?.delta?.content ?? "")
    .join("");
}

const eventsOf = (text: string) =>
  text
    .split("\n")
    .filter((line) => line.startsWith("data: {"))
    .map((line) => JSON.parse(line.slice("data: ".length)) as object);

async function promptTokens({ url }: VllmServer) {
  const page = parsePrometheusText(await (await fetch(`${url}/metrics`)).text());
  const of = (source: string) => page.sum("vllm:prompt_tokens_by_source_total", { source }) ?? 0;
  return {
    local_compute: of("local_compute"),
    external_kv_transfer: of("external_kv_transfer"),
  };
}
