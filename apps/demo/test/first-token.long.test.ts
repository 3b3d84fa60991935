// A long suite: measures whose time the first token took.
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { silentLog } from "@kv/interface";
import { readSpans, type TraceSpan } from "@kv/protocol";
import { afterAll, afterEach, beforeAll, describe, expect, it } from "vitest";
import { startCluster } from "../src/cluster/cluster.js";
import type { ClusterOptions } from "../src/cluster/cluster-plan.js";
import { expectIdle, PAIR, preparedRun } from "./support/matrix.js";
import { type MemoryPair, memoryPair, post, prefillLeg } from "./support/memory-pair.js";

// `seed_first_token` (vllm#51919): P passes the token that it has sampled on, and D emits it.

const SEEDED: Partial<ClusterOptions> = { extraConfig: { seed_first_token: true } };
const closing: (() => Promise<void>)[] = [];
afterEach(async () => {
  for (const close of closing.splice(0).reverse()) await close();
});

/** The prompts' tokens through a cluster's proxy, with streams, and the spans of its servers. */
async function throughProxy(options: Partial<ClusterOptions>) {
  const folder = mkdtempSync(join(tmpdir(), "kv-first-token-"));
  closing.push(async () => rmSync(folder, { recursive: true, force: true }));
  const trace = join(folder, "spans.jsonl");
  const { prompts, expected } = await preparedRun();
  const cluster = await startCluster(
    { ...PAIR, ...options },
    { log: silentLog, logLevel: "error", trace },
  );
  const streams: number[][] = [];
  try {
    for (const [i, prompt] of prompts.entries()) {
      const response = await fetch(`${cluster.proxy.url}/v1/completions`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({
          prompt,
          max_tokens: expected[i]?.length,
          temperature: 0,
          ignore_eos: true,
          stream: true,
          return_token_ids: true,
        }),
      });
      const events = [...(await response.text()).matchAll(/^data: (\{.*)$/gm)].map(
        ([, data = ""]) => JSON.parse(data) as { choices: { token_ids?: number[] }[] },
      );
      streams.push(events.flatMap(({ choices }) => choices[0]?.token_ids ?? []));
    }
    for (const member of [...cluster.prefills, ...cluster.decodes]) await expectIdle(member);
  } finally {
    await cluster.close();
  }
  const spans = readFileSync(trace, "utf8").trim().split("\n").flatMap(readSpans);
  return { streams, expected: expected.map((tokens) => [...tokens]), spans };
}

const named = (spans: readonly TraceSpan[], process: string, name: string) =>
  spans.filter((span) => span.process.includes(process) && span.name === name);

describe.each(["NixlConnector", "NixlPushConnector"])("%s", (connector) => {
  it("streams P's first token once, then D's: the tokens of one engine, and the trace shows that D computed nothing of the prompt", async () => {
    const options = { connector, pushLegs: "prefill-first" } as const;
    const seeded = await throughProxy({ ...options, ...SEEDED });
    expect(seeded.streams).toEqual(seeded.expected);
    const requests = seeded.streams.length;
    const sources = (spans: readonly TraceSpan[], process: string, name: string) =>
      named(spans, process, name).map(({ attributes }) => attributes["kv.first_token"]);
    const fromPrefill = Array(requests).fill("prefill");
    expect(sources(seeded.spans, "decode-0", "kv_engine.request")).toEqual(fromPrefill);
    expect(sources(seeded.spans, "proxy", "kv_proxy.prefill")).toEqual(fromPrefill);
    expect(named(seeded.spans, "decode-0", "kv_engine.compute_prompt")).toEqual([]);
    // Without the setting D computes the last token of each prompt again.
    const plain = await throughProxy(options);
    expect(plain.streams).toEqual(seeded.streams);
    expect(sources(plain.spans, "decode-0", "kv_engine.request")).toEqual(
      Array(requests).fill(undefined),
    );
    const again = named(plain.spans, "decode-0", "kv_engine.compute_prompt");
    expect(again.map(({ attributes }) => attributes["kv.tokens"])).toEqual(Array(requests).fill(1));
  });
});

it("is off by default: P's answer has no such key, and D does not read one", async () => {
  const { prompts, expected } = await preparedRun();
  const both = await memoryPair();
  closing.push(() => both.close());
  const params = await prefillLeg(both, prompts[0] ?? []);
  expect(params).not.toHaveProperty("first_token_ids");
  expect(params["kv_peer"]).not.toHaveProperty("sampling");
  const kv_transfer_params = { ...params, first_token_ids: "none of ours" };
  const { body } = await post(both.decode.url, {
    prompt: prompts[0],
    max_tokens: 16,
    kv_transfer_params,
  });
  expect(body.choices?.[0]?.token_ids).toEqual(expected[0]);
});

describe("a pair without a proxy", () => {
  let both: MemoryPair;
  beforeAll(async () => {
    both = await memoryPair({}, SEEDED);
  });
  afterAll(() => both.close());

  /** What D answers with P's parameters, and without. `prefillAsk`: what P is asked for. */
  async function withAndAlone(ask: object, prefillAsk: object = ask) {
    const { prompts } = await preparedRun();
    const prompt = prompts[0] ?? [];
    const prefilled = await post(both.prefill.url, {
      ...prefillAsk,
      prompt,
      max_tokens: 1,
      kv_transfer_params: { do_remote_decode: true },
    });
    const { kv_transfer_params } = prefilled.body;
    const answers = [];
    for (const params of [kv_transfer_params, undefined])
      answers.push(
        await post(both.decode.url, { ...ask, prompt, max_tokens: 9, kv_transfer_params: params }),
      );
    expect(answers.map(({ status }) => status)).toEqual([200, 200]);
    const [choice, alone] = answers.map(({ body }) => body.choices?.[0]);
    return { params: kv_transfer_params, choice, alone };
  }

  it("sampling with a seed goes on after P's token as in one engine", async () => {
    const sampled = await withAndAlone({ temperature: 1.5, top_p: 0.9, seed: 11 });
    expect(sampled.params).toMatchObject({
      first_token_ids: [sampled.alone?.token_ids[0]],
      kv_peer: { sampling: "[1.5,0.9,0,11]" },
    });
    expect(sampled.choice).toEqual(sampled.alone);
  });

  it("D samples the first token itself where P has sampled with other parameters", async () => {
    const other = await withAndAlone(
      { temperature: 1.5, seed: 11 },
      { temperature: 1.5, seed: 12 },
    );
    expect(other.params?.["first_token_ids"]).not.toEqual([other.alone?.token_ids[0]]);
    expect(other.choice).toEqual(other.alone);
  });

  it("D samples the first token itself where log probabilities are asked for", async () => {
    const logged = await withAndAlone({ logprobs: 0 }, {});
    expect(logged.params).toHaveProperty("first_token_ids");
    expect(logged.choice?.token_ids).toEqual(logged.alone?.token_ids);
    expect(logged.choice).toMatchObject({
      logprobs: { token_logprobs: Array(9).fill(expect.any(Number)) },
    });
  });

  it.each([
    ["a token", 7],
    ["an empty list", []],
    ["two tokens", [7, 8]],
    ["a negative token", [-1]],
    ["a fraction", [0.5]],
    ["text", ["7"]],
    ["no token of the model", [2 ** 31 - 1]],
  ])(
    "%s as first_token_ids is refused by name, and P's blocks are free",
    async (_what, first_token_ids) => {
      const { prompts } = await preparedRun();
      const kv_transfer_params = { ...(await prefillLeg(both, prompts[0] ?? [])), first_token_ids };
      const answer = await post(both.decode.url, {
        prompt: prompts[0],
        max_tokens: 9,
        kv_transfer_params,
      });
      expect(answer).toMatchObject({
        status: 400,
        body: {
          error: {
            code: "KV_REQUEST_INVALID",
            message: expect.stringContaining("first_token_ids"),
          },
        },
      });
      for (const { url } of [both.prefill, both.decode])
        await expectIdle({ name: "", url, backend: null });
    },
  );
});
