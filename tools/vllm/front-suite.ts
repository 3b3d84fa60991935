import { describe, expect, test } from "vitest";
import { BOUNDARY_CASES, comparable, greedyOf, REFUSALS, salted, words } from "./boundary-cases.js";
import { ask, ONE_USE, plain } from "./completion.js";
import { COMPLETIONS, type OpenProxy, type ProxyPair } from "./proxy-pair.js";
import { until } from "./until.js";

/** The `kv-proxy` is in or behind it. */
export type Front = Pick<OpenProxy, "url" | "proxy">;

export const long = {
  model: "tiny",
  prompt: words(200, 10),
  temperature: 0,
  max_tokens: 700,
  ignore_eos: true,
};

/** For a connector or a version with which the others use the same code. */
const SHORT = ["one prompt", "several prompts", "a stream of several prompts", "a chat with n 2"];

/** The front is opened for each test. P must hold no blocks afterwards. */
export function frontSuite(
  pair: ProxyPair,
  {
    name,
    mode,
    open,
    isShort = false,
  }: {
    readonly name: string;
    readonly mode: "pull" | "push";
    readonly open: () => Promise<Front>;
    readonly isShort?: boolean;
  },
): void {
  const requestsAtP = ({ proxy }: Front) => proxy.status().prefillers[0]?.requests ?? 0;

  /** It knows P's address and connector, and in push sends both legs at once. */
  async function openWarmedUp(): Promise<Front> {
    const opened = await open();
    const body = greedyOf("t11 t12", 1);
    expect((await ask(opened.url + COMPLETIONS, body)).status).toBe(200);
    return opened;
  }

  test.each(BOUNDARY_CASES.filter((each) => !isShort || SHORT.includes(each.name)))(
    `$name ($path): ${name} answers like a single server, and P holds no blocks`,
    async ({ path, body, mustContain = "" }) => {
      const opened = await openWarmedUp();
      const before = requestsAtP(opened);
      const ours = await comparable(await ask(opened.url + path, salted(body)));
      expect(ours).toEqual(await comparable(await ask(pair.d.url + path, salted(body))));
      expect(ours).toMatchObject({ status: 200 });
      expect(JSON.stringify(ours)).toContain(mustContain);
      expect(requestsAtP(opened)).toBeGreaterThan(before);
      if (isShort) expect(opened.proxy.status().prefillers[0]?.failures).toBe(0);
      await pair.freed();
    },
  );

  if (!isShort) {
    test.each(REFUSALS)(
      `refused request, $name: ${name} returns the server's status and message, and P holds no blocks`,
      async ({ body }) => {
        const { url } = await openWarmedUp();
        const right = await pair.answersAlike(url, body);
        expect((right as { status: number }).status).toBeLessThan(500);
        // Where D alone refuses, a P that pushes is not told.
        await (mode === "push" ? pair.leaseEnded() : pair.freed());
      },
    );

    connectorMembersTest(pair, name, openWarmedUp);
  }

  test("client aborts while D generates: D stops, and P holds no blocks", async () => {
    const { url } = await openWarmedUp();
    const client = new AbortController();
    const { signal } = client;
    const answer = await ask(url + COMPLETIONS, { ...long, stream: true }, { signal });
    await answer.body?.getReader().read();
    client.abort();
    await pair.idle(pair.d);
    await pair.freed();
  });

  test("client aborts while P computes: P stops and holds no blocks", async () => {
    const { url, proxy } = await openWarmedUp();
    const client = new AbortController();
    const body = { ...long, prompt: words(900, 11) };
    const answer = ask(url + COMPLETIONS, body, { signal: client.signal });
    const running = () => {
      const { prefillers, decoders } = proxy.status();
      return [...prefillers, ...decoders].map(({ in_flight }) => in_flight);
    };
    await until(() => running()[0] === 1, "the prefill leg runs", { everyMs: 1 });
    expect(running()).toEqual([1, mode === "push" ? 1 : 0]);
    client.abort();
    await expect(answer).rejects.toThrow();
    await until(() => proxy.status().requests.in_flight === 0, "the proxy has ended the request");
    await pair.idle(pair.p);
    await pair.idle(pair.d);
    await pair.freed();
  });
}

const PATHS = [COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/v1/messages"];
const REQUEST = {
  model: "tiny",
  prompt: words(40, 40),
  input: words(40, 40),
  max_tokens: 4,
  messages: [{ role: "user", content: words(40, 40) }],
};

/** Those of the first line end EngineCore, or make it answer 500. */
const WAYS = [
  ...['""', '"x"', "0", "[]"].map((value) => `"vllm_xargs":{"kv_transfer_params":${value}}`),
  '"vllm_xargs":{"\\u006bv_transfer_params":0}',
  '"vllm_xargs":{"kv_transfer_params":0},"vllm_xargs":{}',
  '"vllm_xargs":{"ec_transfer_params":"x"}',
  '"kv_transfer_params":{"do_remote_prefill":true},"kv_transfer_params":null',
  '"ec_transfer_params":{"a":1}',
  '"kv_hints":{}',
];
/** Ways through the front: two legs, P alone, D alone. */
const FLOWS = [
  {},
  { n: 2, temperature: 0.9 },
  { echo: true, max_tokens: 0 },
  { use_beam_search: true },
];

/** Both engines must serve afterwards. */
export function connectorMembersTest(
  pair: ProxyPair,
  name: string,
  open: () => Promise<{ readonly url: string }>,
): void {
  test(`${name}: what reaches vLLM's connector is refused with 400, and the engines of P and D live`, async () => {
    const { url } = await open();
    for (const path of PATHS)
      for (const way of WAYS)
        for (const flow of path === COMPLETIONS ? FLOWS : [{}]) {
          const body = `${JSON.stringify({ ...REQUEST, ...flow }).slice(0, -1)},${way}}`;
          const headers = { "content-type": "application/json", ...ONE_USE };
          const answer = await fetch(url + path, { method: "POST", headers, body });
          const text = await answer.text();
          expect([answer.status, text], body).toEqual([
            400,
            expect.stringMatching(/xargs|transfer_params|kv_hints/),
          ]);
        }
    for (const server of [pair.p, pair.d]) await plain(server.url, [20, 30], 2);
    await pair.freed();
  });
}

export function shortSuite(pair: ProxyPair, mode: "pull" | "push" | "auto"): void {
  describe(`--mode ${mode}`, () =>
    frontSuite(pair, {
      name: "kv-proxy",
      mode: pair.kind.mode,
      open: () => pair.proxied({ mode }),
      isShort: true,
    }));
}
