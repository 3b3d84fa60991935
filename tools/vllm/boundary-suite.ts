import { afterAll, describe, expect, test } from "vitest";
import {
  BOUNDARY_CASES,
  type BoundaryCase,
  comparable,
  greedyOf,
  REFUSALS,
  salted,
  words,
} from "./boundary-cases.js";
import { ask } from "./completion.js";
import { connectorMembersTest, frontSuite } from "./front-suite.js";
import { waitSeconds } from "./held-blocks.js";
import { COMPLETIONS, type ProxyPair } from "./proxy-pair.js";

/** The toy proxy is the negative control. */
export function boundarySuite(pair: ProxyPair): void {
  frontSuite(pair, { name: "kv-proxy", mode: "pull", open: () => pair.proxied() });

  describe("the toy proxy", () => {
    afterAll(() => pair.leaseEnded());

    // The first request puts the full blocks into D's prefix cache: D's engine would exit when the
    // transfer parameters name fewer blocks than D lacks.
    async function answersCorrectly({ path, body }: BoundaryCase): Promise<boolean> {
      const right = await comparable(await ask(pair.d.url + path, body));
      // D waits for ever when it gets the transfer parameters of another prompt.
      const answer = await ask((await pair.toy()) + path, body, {
        signal: AbortSignal.timeout(60_000),
      })
        .then(comparable)
        .catch((error: unknown) => String(error));
      return JSON.stringify(answer) === JSON.stringify(right);
    }

    const fails = BOUNDARY_CASES.filter(({ toy }) => toy === undefined);
    test.each(fails)("$name ($path): gives a wrong answer or an error", async (each) => {
      expect(await answersCorrectly(each)).toBe(false);
    });

    test("cases that leak: gives the correct answer, but leaves blocks at P", async () => {
      await pair.leaseEnded();
      for (const each of BOUNDARY_CASES.filter(({ toy }) => toy === "leaks")) {
        const before = await pair.held();
        expect(await answersCorrectly(each), each.name).toBe(true);
        // P frees blocks within 2 s of a notification. All cases take less than a lease.
        await waitSeconds(pair.p, 2);
        expect(await pair.held(), each.name).toBeGreaterThan(before);
      }
    });
  });

  test.each(REFUSALS)("refused request, $name: the toy proxy returns 500", async ({ body }) => {
    expect((await ask((await pair.toy()) + COMPLETIONS, body)).status).toBe(500);
  });

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

  test("trace context reaches P and D, and X-data-parallel-rank, a rank of one server, D; the toy proxy forwards neither", async () => {
    const taps = [await pair.tap({}, pair.p.url), await pair.tap()] as const;
    const [p, d] = taps;
    const { url } = await pair.proxied({ prefillers: [p.url], decoders: [d.url] });
    const toy = await pair.toy(p.url, d.url);
    const headers = {
      traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
      tracestate: "vendor=value",
      "x-data-parallel-rank": "0",
    };
    const passed = (head: string | undefined) =>
      Object.entries(headers).map(([name, value]) => head?.includes(`\r\n${name}: ${value}`));
    const body = greedyOf(words(40, 15), 2);
    for (const [at, through] of [url, toy].entries()) {
      expect((await ask(through + COMPLETIONS, body, { headers })).status).toBe(200);
      const isOurs = through === url;
      expect(taps.map(({ heads }) => heads.length)).toEqual([at + 1, at + 1]);
      expect(passed(p.heads[at])).toEqual([isOurs, isOurs, false]);
      expect(passed(d.heads[at])).toEqual([isOurs, isOurs, isOurs]);
    }
    await pair.freed();
  });

  test("an unknown data-parallel rank is refused as by a single server; the toy proxy serves the request", async () => {
    const { url } = await pair.proxied();
    const toy = await pair.toy();
    const headers = { "x-data-parallel-rank": "7" };
    const body = greedyOf(words(40, 16), 2);
    const answer = async (at: string) => comparable(await ask(at + COMPLETIONS, body, { headers }));
    const right = await answer(pair.d.url);
    expect(right).toMatchObject({ status: 400 });
    expect(await answer(url)).toEqual(right);
    await pair.freed();
    expect(await answer(toy)).toMatchObject({ status: 200 });
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
