import { afterAll, describe, expect, test } from "vitest";
import { BOUNDARY_CASES, type BoundaryCase, comparable, REFUSALS, salted, words } from "./boundary-cases.js";
import { startHttpTap } from "./http-tap.js";
import { pass } from "./kept-prompts.js";
import { ask, type ProxyPair } from "./proxy-pair.js";
import { startToyProxy } from "./toy-proxy.js";

/** Every boundary case: `kv-proxy` answers as one server does. A naive proxy, the negative control, does not. */
export function boundarySuite(pair: ProxyPair): void {
  test.each(BOUNDARY_CASES)(
    "$name ($path): kv-proxy answers as one server does, and P holds nothing",
    async ({ path, body, shows = "" }) => {
      const { url } = await pair.proxied();
      const ours = await comparable(await ask(url + path, salted(body)));
      expect(ours).toEqual(await comparable(await ask(pair.d.url + path, salted(body))));
      expect(ours).toMatchObject({ status: 200 });
      expect(JSON.stringify(ours)).toContain(shows);
      await pair.freed();
    },
  );

  describe("a naive proxy", () => {
    // Waits once for the leases of all blocks that these tests left at P.
    afterAll(() => pair.leaseEnded());

    // The first request goes to D directly and puts the full blocks into D's prefix cache. Otherwise D's engine would die
    // when the transfer parameters name fewer blocks than D lacks.
    async function isRight({ path, body }: BoundaryCase): Promise<boolean> {
      const right = await comparable(await ask(pair.d.url + path, body));
      const toy = await startToyProxy(pair.p.url, pair.d.url);
      pair.closing(toy);
      // With the transfer parameters of another prompt the decode worker waits for ever.
      const answer = await ask(toy.url + path, body, { signal: AbortSignal.timeout(60_000) })
        .then(comparable)
        .catch((error: unknown) => String(error));
      return JSON.stringify(answer) === JSON.stringify(right);
    }

    const fails = BOUNDARY_CASES.filter(({ toyToo, toyLeaks }) => toyToo !== true && toyLeaks !== true);
    test.each(fails)("$name ($path): answers something else", async (each) => {
      expect(await isRight(each)).toBe(false);
    });

    test("several copies, and what is made of the prompts alone: answers the same, and each time blocks stay at P", async () => {
      await pair.leaseEnded();
      for (const each of BOUNDARY_CASES.filter(({ toyLeaks }) => toyLeaks)) {
        const before = await pair.held();
        expect(await isRight(each), each.name).toBe(true);
        // 2 s: longer than P needs to free blocks after a notification. All cases together take less than a lease.
        await pass(pair.p, 2);
        expect(await pair.held(), each.name).toBeGreaterThan(before);
      }
    });
  });

  describe.each(REFUSALS)("refused: $name", ({ body }) => {
    test("kv-proxy says what the server says, and P holds nothing; a naive proxy says 500", async () => {
      const { url } = await pair.proxied();
      const right = await comparable(await ask(`${pair.d.url}/v1/completions`, body));
      expect(await comparable(await ask(`${url}/v1/completions`, body))).toEqual(right);
      expect((right as { status: number }).status).toBeLessThan(500);
      await pair.freed();
      const toy = await startToyProxy(pair.p.url, pair.d.url);
      pair.closing(toy);
      expect((await ask(`${toy.url}/v1/completions`, body)).status).toBe(500);
    });
  });

  test("stop at the first token: the answer is empty of text and P holds nothing", async () => {
    const { url } = await pair.proxied();
    const body = { model: "tiny", prompt: words(60, 7), temperature: 0, max_tokens: 8 };
    const first = (await (
      await ask(`${pair.d.url}/v1/completions`, { ...body, max_tokens: 1, return_token_ids: true })
    ).json()) as {
      choices: { token_ids: number[] }[];
    };
    const stop = { ...body, stop_token_ids: first.choices[0]?.token_ids };
    const ours = await comparable(await ask(`${url}/v1/completions`, stop));
    expect(ours).toEqual(await comparable(await ask(`${pair.d.url}/v1/completions`, stop)));
    expect(ours).toMatchObject({ body: { choices: [{ finish_reason: "stop" }] } });
    await pair.freed();
  });

  test("tokens that were cached: those that P had, as one server says of itself, in each form of answer", async () => {
    const { url } = await pair.proxied();
    const completion = { model: "tiny", prompt: words(70, 12), max_tokens: 4 };
    const counted = { ...completion, stream: true, stream_options: { include_usage: true } };
    const chat = { model: "tiny", messages: [{ role: "user", content: words(70, 12) }], max_tokens: 4 };
    for (const [path, body] of [
      ["/v1/completions", completion],
      ["/v1/completions", counted],
      ["/v1/chat/completions", chat],
    ] as const) {
      const [here, there] = [salted(body), salted(body)];
      // First no cached tokens, then those of the two full blocks of the prompt.
      for (const cached of [0, 64]) {
        const told = await Promise.all([
          cachedTokens(url + path, here),
          cachedTokens(pair.d.url + path, there),
        ]);
        expect(told).toEqual([cached, cached]);
      }
    }
    await pair.freed();
  });

  test("several prompts: cached tokens are those of all of them, where one server says the last one's", async () => {
    const { url } = await pair.proxied();
    const body = { model: "tiny", prompt: [words(40, 13), words(100, 14)], max_tokens: 4 };
    const [here, there] = [salted(body), salted(body)];
    const told = () =>
      Promise.all([
        cachedTokens(`${url}/v1/completions`, here),
        cachedTokens(`${pair.d.url}/v1/completions`, there),
      ]);
    expect(await told()).toEqual([0, 0]);
    expect(await told()).toEqual([32 + 96, 96]);
    await pair.freed();
  });

  test("the client's id comes back, and the models are D's", async () => {
    const { url } = await pair.proxied();
    const body = { model: "tiny", prompt: "t11 t12", max_tokens: 1 };
    const answer = await ask(`${url}/v1/completions`, body, { headers: { "x-request-id": "mine" } });
    expect(answer.headers.get("x-request-id")).toBe("mine");
    expect(((await answer.json()) as { id: string }).id).toBe("cmpl-mine");
    const models = (await (await fetch(`${url}/v1/models`)).json()) as { data: { id: string }[] };
    expect(models.data.map(({ id }) => id)).toEqual(["tiny"]);
  });

  test("trace context and the data-parallel rank reach both servers; of a naive proxy, neither", async () => {
    const taps = [await startHttpTap(pair.p.url), await startHttpTap(pair.d.url)] as const;
    const [p, d] = taps;
    for (const tap of taps) pair.closing(tap);
    const { url } = await pair.proxied({ prefillers: [p.url], decoders: [d.url] });
    const toy = await startToyProxy(p.url, d.url);
    pair.closing(toy);
    const headers = {
      traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
      tracestate: "vendor=value",
      "x-data-parallel-rank": "0",
    };
    const passed = (head: string | undefined) =>
      Object.entries(headers).map(([name, value]) => head?.includes(`\r\n${name}: ${value}`));
    const body = { model: "tiny", prompt: words(40, 15), max_tokens: 2 };
    for (const [at, through] of [url, toy.url].entries()) {
      expect((await ask(`${through}/v1/completions`, body, { headers })).status).toBe(200);
      const expected = Array(3).fill(through === url);
      expect(taps.map(({ heads }) => heads.length)).toEqual([at + 1, at + 1]);
      for (const { heads } of taps) expect(passed(heads[at])).toEqual(expected);
    }
    await pair.freed();
  });

  test("a data-parallel rank that there is not is refused as by one server; a naive proxy serves it", async () => {
    const { url } = await pair.proxied();
    const toy = await startToyProxy(pair.p.url, pair.d.url);
    pair.closing(toy);
    const headers = { "x-data-parallel-rank": "7" };
    const body = { model: "tiny", prompt: words(40, 16), max_tokens: 2 };
    const answer = async (at: string) => comparable(await ask(`${at}/v1/completions`, body, { headers }));
    const right = await answer(pair.d.url);
    expect(right).toMatchObject({ status: 400 });
    expect(await answer(url)).toEqual(right);
    await pair.freed();
    expect(await answer(toy.url)).toMatchObject({ status: 200 });
  });
}

/** The cached tokens in the usage of an answer, streamed or not; undefined when the usage does not contain them. */
async function cachedTokens(url: string, body: unknown): Promise<number | undefined> {
  const text = await (await ask(url, body)).text();
  const [, cached] = /"prompt_tokens_details":\s*{[^}]*"cached_tokens":\s*(\d+)/.exec(text) ?? [];
  return cached === undefined ? undefined : Number(cached);
}
