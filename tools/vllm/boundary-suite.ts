import { expect, test } from "vitest";
import { type BoundaryCase, comparable, greedyOf, salted, words } from "./boundary-cases.js";
import { ask } from "./completion.js";
import { connectorMembersTest, frontSuite } from "./front-suite.js";
import { COMPLETIONS, type ProxyPair } from "./proxy-pair.js";

export function boundarySuite(pair: ProxyPair): void {
  frontSuite(pair, { name: "kv-proxy", mode: "pull", open: () => pair.proxied() });

  connectorMembersTest(
    pair,
    "kv-proxy with --disaggregate-above and --unsplittable decode-computes",
    () => pair.proxied({ disaggregateAbove: 1000, policy: { unsplittable: "decode-computes" } }),
  );

  test("the first token is a stop token: kv-proxy answers like a single server, and P holds no blocks", async () => {
    const { url } = await pair.proxied();
    const body = greedyOf(words(60, 7), 8);
    const first = (await (
      await ask(pair.d.url + COMPLETIONS, { ...body, max_tokens: 1, return_token_ids: true })
    ).json()) as {
      choices: { token_ids: number[] }[];
    };
    const stop = { ...body, stop_token_ids: first.choices[0]?.token_ids };
    expect(await pair.answersAlike(url, stop)).toMatchObject({
      body: { choices: [{ finish_reason: "stop" }] },
    });
    await pair.freed();
  });

  test("cached_tokens equals a single server's, for a completion, a stream and a chat", async () => {
    const { url } = await pair.proxied();
    const completion = greedyOf(words(70, 12), 4);
    const counted = { ...completion, stream: true, stream_options: { include_usage: true } };
    const chat = {
      model: "tiny",
      messages: [{ role: "user", content: words(70, 12) }],
      max_tokens: 4,
    };
    for (const [path, body] of [
      [COMPLETIONS, completion],
      [COMPLETIONS, counted],
      ["/v1/chat/completions", chat],
    ] as const) {
      // The second request finds the two full blocks of the prompt.
      expect(await cachedTwice(url + path, pair.d.url + path, body)).toEqual([
        [0, 0],
        [64, 64],
      ]);
    }
    await pair.freed();
  });

  test("cached_tokens of several prompts: kv-proxy reports the sum, vLLM only the last prompt's", async () => {
    const { url } = await pair.proxied();
    const body = greedyOf([words(40, 13), words(100, 14)], 4);
    expect(await cachedTwice(url + COMPLETIONS, pair.d.url + COMPLETIONS, body)).toEqual([
      [0, 0],
      [32 + 96, 96],
    ]);
    await pair.freed();
  });

  test("X-Request-Id is returned, and /v1/models lists D's models", async () => {
    const { url } = await pair.proxied();
    const body = greedyOf("t11 t12", 1);
    const answer = await ask(url + COMPLETIONS, body, {
      headers: { "x-request-id": "mine" },
    });
    expect(answer.headers.get("x-request-id")).toBe("mine");
    expect(((await answer.json()) as { id: string }).id).toBe("cmpl-mine");
    const models = (await (await fetch(`${url}/v1/models`)).json()) as { data: { id: string }[] };
    expect(models.data.map(({ id }) => id)).toEqual(["tiny"]);
  });

  test("trace context reaches P and D, and X-data-parallel-rank, a rank of one server, D", async () => {
    const [p, d] = [await pair.tap({}, pair.p.url), await pair.tap()];
    const { url } = await pair.proxied({ prefillers: [p.url], decoders: [d.url] });
    const headers = {
      traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
      tracestate: "vendor=value",
      "x-data-parallel-rank": "0",
    };
    const passed = (head: string) =>
      Object.entries(headers).map(([name, value]) => head.includes(`\r\n${name}: ${value}`));
    const body = greedyOf(words(40, 15), 2);
    expect((await ask(url + COMPLETIONS, body, { headers })).status).toBe(200);
    expect(p.heads.map(passed)).toEqual([[true, true, false]]);
    expect(d.heads.map(passed)).toEqual([[true, true, true]]);
    await pair.freed();
  });

  test("an unknown data-parallel rank is refused as by a single server", async () => {
    const { url } = await pair.proxied();
    const headers = { "x-data-parallel-rank": "7" };
    const body = greedyOf(words(40, 16), 2);
    const answer = async (at: string) => comparable(await ask(at + COMPLETIONS, body, { headers }));
    const right = await answer(pair.d.url);
    expect(right).toMatchObject({ status: 400 });
    expect(await answer(url)).toEqual(right);
    await pair.freed();
  });
}

/** Of the same request at both places, and again. */
async function cachedTwice(here: string, there: string, body: BoundaryCase["body"]) {
  const [first, second] = [salted(body), salted(body)];
  const counts = () => Promise.all([cachedTokens(here, first), cachedTokens(there, second)]);
  return [await counts(), await counts()];
}

async function cachedTokens(url: string, body: unknown): Promise<number | undefined> {
  const text = await (await ask(url, body)).text();
  const [, cached] = /"prompt_tokens_details":\s*{[^}]*"cached_tokens":\s*(\d+)/.exec(text) ?? [];
  return cached === undefined ? undefined : Number(cached);
}
