import { describe, expect, test } from "vitest";
import { errorOf, post, runFleet, runPair, upstream, upstreams } from "../support/set-up.js";
import { vllmPair } from "../support/vllm-stub.js";

type Shape = "a proxy" | "a sidecar";

async function pair(shape: Shape = "a proxy") {
  const vllm = vllmPair();
  const { prefill, decode } = vllm;
  const alone = await upstream(vllm.alone);
  const isSidecar = shape === "a sidecar";
  const running = await runFleet([prefill, prefill], isSidecar ? [decode] : [decode, decode], {
    ...(isSidecar && { prefillers: [], sidecar: { allow: ["127.0.0.1"] } }),
  });
  const named = running.p.map(({ url }) => new URL(url).host).join(", ");
  const headers = { "x-request-id": "r", ...(isSidecar && { "x-prefiller-host-port": named }) };
  return {
    ...running,
    vllm,
    headers,
    /** The proxy's answer to a body, and that of one server. */
    both: async (path: string, body: object) => {
      const ask = (url: string) => post(url + path, { model: "m", ...body }, { headers });
      return [await ask(running.url), await ask(alone.url)] as const;
    },
    /** No blocks stay held, and no server has read or freed what it should not. */
    expectLevel: async () => {
      await expect.poll(() => vllm.held.size).toBe(0);
      expect(vllm.counts).toEqual({ computedAtDecode: 0, garbage: 0, unknownFrees: 0 });
    },
  };
}

/** Chunks of all choices in the order of the choice: between choices the order is chance. */
function byChoice(text: string): unknown[] {
  const events = text.trim().split("\n\n");
  expect(events.at(-1)).toBe("data: [DONE]");
  type Chunk = { readonly choices: readonly { readonly index: number }[] };
  const chunks = events.slice(0, -1).map((event): Chunk => JSON.parse(event.slice(6)));
  const index = ({ choices }: Chunk) => choices[0]?.index ?? Number.POSITIVE_INFINITY;
  return chunks.sort((a, b) => index(a) - index(b));
}

const completions: readonly object[] = [
  { prompt: "one prompt" },
  { prompt: ["first prompt", "second, longer prompt", "ünïcödé 🎈"] },
  {
    prompt: [
      [1, 2, 3],
      [4, 5],
    ],
  },
  { prompt: [1, 2, 3] },
  { prompt: "several copies", n: 3, seed: 7 },
  { prompt: ["a b c d", "e f"], n: 2, seed: 1, max_tokens: 3 },
  { prompt: "least", min_tokens: 4, max_tokens: 4 },
  { prompt: "only one", max_tokens: 1 },
  { prompt: "stops at once", stop: "." },
  { prompt: "echoed text", echo: true },
  { prompt: "echoed text", echo: true, max_tokens: 0 },
  { prompt: "echoed 🎈 text", echo: true, logprobs: 2 },
  { prompt: "echoed text", echo: true, logprobs: 2, max_tokens: 0 },
  { prompt: ["echoed text", "and another"], echo: true, logprobs: 1, n: 2, seed: 1 },
  { prompt: "with logprobs", logprobs: 3 },
];

const messages = [{ role: "user", content: "hi" }];
const tools = [{ type: "function", function: { name: "f", parameters: {} } }];

describe.each<Shape>(["a proxy", "a sidecar"])("%s", (shape) => {
  test.each([
    ...completions,
    { prompt: "of the prompt", prompt_logprobs: 1 },
    { prompt: ["x y", "z"], prompt_logprobs: 0, n: 2, seed: 1 },
  ])("answers %j as one server does, and no blocks stay held", async (body) => {
    const { both, expectLevel } = await pair(shape);
    const [ours, reference] = await both("/v1/completions", body);
    expect(ours.status).toBe(200);
    expect(await ours.json()).toEqual(await reference.json());
    expect(ours.headers.get("x-request-id")).toBe("r");
    await expectLevel();
  });

  test.each(completions)("streams %j as one server does", async (body) => {
    const { both, expectLevel } = await pair(shape);
    const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
    const [ours, reference] = await both("/v1/completions", streamed);
    expect(byChoice(await ours.text())).toEqual(byChoice(await reference.text()));
    await expectLevel();
  });

  test.each<object>([
    { messages },
    { messages, n: 2, seed: 3 },
    { messages, tools, tool_choice: "required", chat_template_kwargs: { enable_thinking: false } },
    { messages, prompt_logprobs: 2 },
    { messages, max_completion_tokens: 2, min_tokens: 2 },
  ])("answers chat %j as one server does, streamed and not", async (body) => {
    const { both, expectLevel } = await pair(shape);
    const [ours, reference] = await both("/v1/chat/completions", body);
    expect(await ours.json()).toEqual(await reference.json());
    if (!("prompt_logprobs" in body)) {
      const [own, other] = await both("/v1/chat/completions", { ...body, stream: true });
      expect(byChoice(await own.text())).toEqual(byChoice(await other.text()));
    }
    await expectLevel();
  });

  test.each<object>([
    { prompt: ["fine", "also fine"], temperature: -1 },
    { prompt: "a", min_tokens: 5, max_tokens: 2 },
    { prompt: "a", stream_options: { include_usage: true } },
    { prompt: "a", stream: true, prompt_logprobs: 1 },
    // More parts than the limit.
    { prompt: ["a", "b"], n: 200 },
  ])("refuses %j with 400, and no blocks stay held", async (body) => {
    const { vllm, ask, headers } = await pair(shape);
    expect((await ask(body, { headers })).status).toBe(400);
    expect(vllm.held.size).toBe(0);
  });

  test.each(['"5"', "1.0", "true"])(
    "refuses copies with a seed of %s, which vLLM accepts as an integer",
    async (seed) => {
      const { vllm, ask, headers } = await pair(shape);
      const refused = await ask(`{"prompt":"a","n":2,"seed":${seed}}`, { headers });
      expect(await errorOf(refused)).toMatchObject({
        status: 400,
        message: expect.stringContaining("seed is"),
      });
      expect(vllm.held.size).toBe(0);
      for (const fine of ['{"prompt":"a","n":2,"seed":null}', `{"prompt":"a","seed":${seed}}`])
        expect((await ask(fine, { headers })).status).toBe(200);
    },
  );
});

test("copies of a prompt go to one prefill instance, the first before the others", async () => {
  const { prefill, decode } = vllmPair();
  const { ask, p } = await runFleet([prefill, prefill, prefill], [decode]);
  await ask({ prompt: ["a", "b"], n: 3 });
  const prompts = p.map(({ seen }) => seen.map(({ json }) => json.prompt));
  expect([...prompts].sort()).toEqual([[], ["a", "a", "a"], ["b", "b", "b"]]);
});

test("copies of a prompt go to one rank of a data-parallel prefill instance", async () => {
  const vllm = vllmPair();
  const p = await upstream(vllm.prefill);
  const prefillers = [`${p.url}@0`, `${p.url}@1`];
  const { ask } = await runPair({ d: vllm.decode }, { prefillers });
  await ask({ prompt: ["a", "b"], n: 3 });
  const ranks = (prompt: string) =>
    p.seen
      .filter(({ json }) => json.prompt === prompt)
      .map(({ headers }) => headers["x-data-parallel-rank"]);
  expect([ranks("a"), ranks("b")].sort()).toEqual([
    ["0", "0", "0"],
    ["1", "1", "1"],
  ]);
});

test("the vLLM stub answers a proxy that does not split with garbage", async () => {
  const vllm = vllmPair();
  const [p, d] = await upstreams(vllm.prefill, vllm.decode);
  const body = { prompt: ["a", "b"], n: 1 };
  const asked = { ...body, max_tokens: 1, kv_transfer_params: { do_remote_decode: true } };
  const answer = await post(`${p.url}/v1/completions`, asked);
  const { kv_transfer_params } = (await answer.json()) as Record<string, unknown>;
  await post(`${d.url}/v1/completions`, { ...body, kv_transfer_params });
  expect(vllm.counts.garbage).toBe(1);
  expect(vllm.held.size).toBe(1);
});
