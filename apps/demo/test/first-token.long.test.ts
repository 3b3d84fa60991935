// A long suite: measures whose time the first token took.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { readSpans, type TraceSpan } from "@kv/testing/recorded-spans";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { afterAll, beforeAll, describe, expect, it, onTestFinished } from "vitest";
import type { ClusterOptions } from "../src/cluster/cluster-plan.js";
import { complete } from "../src/run/completion-client.js";
import { expectAllIdle, expectIdle, preparedRun, startPair } from "./support/matrix.js";
import { type MemoryPair, memoryPair, post, prefillLeg } from "./support/memory-pair.js";

// `seed_first_token` (vllm#51919): P passes the token that it has sampled on, and D emits it.

const SEEDED: Partial<ClusterOptions> = { extraConfig: { seed_first_token: true } };

/** The prompts' tokens through a cluster's proxy, with streams, and the spans of its servers. */
async function throughProxy(options: Partial<ClusterOptions>) {
  const trace = join(scratchFolder(onTestFinished), "spans.jsonl");
  const { prompts, expected } = await preparedRun();
  const streams: (readonly number[])[] = [];
  {
    await using cluster = await startPair(options, { trace });
    const { url } = cluster.proxy;
    for (const [i, promptTokens] of prompts.entries()) {
      const maxTokens = expected[i]?.length ?? 0;
      const outcome = await complete({ url, requestId: `stream-${i}`, promptTokens, maxTokens });
      streams.push(outcome.tokens);
    }
    await expectAllIdle(cluster);
  }
  const spans = readFileSync(trace, "utf8").trim().split("\n").flatMap(readSpans);
  return { streams, expected, spans };
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
  const { prompt, answer } = await preparedRun();
  const both = await memoryPair();
  onTestFinished(() => both.close());
  const params = await prefillLeg(both, prompt);
  expect(params).not.toHaveProperty("first_token_ids");
  expect(params["kv_peer"]).not.toHaveProperty("sampling");
  const kv_transfer_params = { ...params, first_token_ids: "none of ours" };
  const { body } = await post(both.decode.url, { prompt, max_tokens: 16, kv_transfer_params });
  expect(body.choices?.[0]?.token_ids).toEqual(answer);
});

describe("a pair without a proxy", () => {
  let both: MemoryPair;
  beforeAll(async () => {
    both = await memoryPair({}, SEEDED);
  });
  afterAll(() => both.close());

  it("sampling with a seed goes on after P's token as in one engine", async () => {
    const { prompt } = await preparedRun();
    const ask = { prompt, temperature: 1.5, top_p: 0.9, seed: 11 };
    const asked = { ...ask, max_tokens: 1, kv_transfer_params: { do_remote_decode: true } };
    const { kv_transfer_params } = (await post(both.prefill.url, asked)).body;
    const decoded = async (params: object) =>
      (await post(both.decode.url, { ...ask, max_tokens: 9, ...params })).body.choices?.[0];
    const [choice, alone] = [await decoded({ kv_transfer_params }), await decoded({})];
    expect(kv_transfer_params).toMatchObject({
      first_token_ids: [alone?.token_ids[0]],
      kv_peer: { sampling: "[1.5,0.9,0,11]" },
    });
    expect(choice).toEqual(alone);
  });

  it.each([
    ["two tokens", [7, 8]],
    ["no token of the model", [2 ** 31 - 1]],
  ])(
    "%s as first_token_ids is refused by name, and P's blocks are free",
    async (_what, first_token_ids) => {
      const { prompt } = await preparedRun();
      const kv_transfer_params = { ...(await prefillLeg(both, prompt)), first_token_ids };
      const asked = { prompt, max_tokens: 9, kv_transfer_params };
      const answer = await post(both.decode.url, asked);
      expect(answer).toMatchObject({
        status: 400,
        body: {
          error: {
            code: "KV_REQUEST_INVALID",
            message: expect.stringContaining("first_token_ids"),
          },
        },
      });
      await expectIdle(both.prefill, both.decode);
    },
  );
});
