// A long suite: requests of all kinds in memory.
import { afterEach, describe, expect, it } from "vitest";
import { type Cluster, startCluster } from "../src/cluster/cluster.js";
import { jsonLog } from "../src/processes/json-log.js";
import { fetchRecords } from "../src/run/check-run.js";
import { complete } from "../src/run/completion-client.js";
import { expectIdle, PAIR, preparedRun } from "./support/matrix.js";
import {
  type Answer,
  type MemoryPair,
  memoryPair,
  post,
  prefillLeg,
} from "./support/memory-pair.js";

const closing: { close(): Promise<void> }[] = [];
afterEach(async () => {
  for (const each of closing.splice(0)) await each.close();
});

async function open<T extends { close(): Promise<void> }>(opening: Promise<T>): Promise<T> {
  const opened = await opening;
  closing.push(opened);
  return opened;
}
const cluster = (): Promise<Cluster> =>
  open(startCluster({ ...PAIR, leaseSeconds: 3 }, { log: jsonLog("error"), logLevel: "error" }));
const pair = (decodeConfig?: Record<string, unknown>): Promise<MemoryPair> =>
  open(memoryPair(decodeConfig));

describe("a pair behind a proxy", () => {
  it("transfers only KV that the decode instance does not have", async () => {
    const { prompts, expected } = await preparedRun();
    const { proxy, decodes } = await cluster();
    const prompt = prompts[0] ?? [];
    const ask = (requestId: string, promptTokens: readonly number[]) =>
      complete({ url: proxy.url, requestId, promptTokens, maxTokens: 16 });
    const first = await ask("first", prompt);
    const again = await ask("again", prompt);
    expect(again.tokens).toEqual(expected[0]);
    // The next turn: the prompt, its answer and one more token.
    const turn = [...prompt, ...first.tokens, 77];
    const next = await ask("next", turn);
    expect(next.tokens).toHaveLength(16);
    const records = await fetchRecords(decodes[0]?.url ?? "");
    const of = (id: string) =>
      records.find(({ request_id }) => request_id.startsWith(`cmpl-${id}-`));
    const blockBytes = 4 * 4 * 16 * 64 * 4;
    expect(of("first")).toMatchObject({
      tokens: 100,
      cached_tokens: 0,
      transfer: { length_bytes: 7 * blockBytes },
    });
    expect(of("again")).toMatchObject({
      tokens: 100,
      cached_tokens: 96,
      transfer: { length_bytes: blockBytes },
    });
    expect(of("next")).toMatchObject({
      tokens: 117,
      cached_tokens: 112,
      transfer: { length_bytes: blockBytes },
    });
    // One engine alone computes the same tokens.
    const alone = await post(decodes[0]?.url ?? "", { prompt: turn, max_tokens: 16 });
    expect(alone.body.choices?.[0]?.token_ids).toEqual(next.tokens);
  });

  it("field.md R13: a prompt that is too long is refused in the words of one engine, without P's limit of one token", async () => {
    const { proxy, decodes } = await cluster();
    const body = { prompt: Array(3000).fill(7), max_tokens: 9 };
    const [ours, alone] = await Promise.all([
      post(proxy.url, body),
      post(decodes[0]?.url ?? "", body),
    ]);
    expect(alone).toMatchObject({ status: 400 });
    const words = ({ error }: Answer) => error?.message.replace(/request \S+:/, "");
    expect([ours.status, words(ours.body)]).toEqual([400, words(alone.body)]);
  });

  it("holds nothing after clients disconnected at any moment, and continues", async () => {
    const { prompts, expected } = await preparedRun();
    const { proxy, prefills, decodes } = await cluster();
    const outcomes = await Promise.all(
      Array.from({ length: 24 }, async (_, i) => {
        const gone = new AbortController();
        // The aborts are spread over the phases of a request: queue, prefill, transfer, decode.
        setTimeout(() => gone.abort(), i * 12);
        const promptTokens = [...(prompts[i % prompts.length] ?? []), 100 + i];
        const request = {
          url: proxy.url,
          requestId: `gone-${i}`,
          promptTokens,
          maxTokens: 400,
          signal: gone.signal,
        };
        return complete(request).then(
          () => "complete",
          () => "gone",
        );
      }),
    );
    expect(outcomes).toContain("gone");
    for (const member of [...prefills, ...decodes]) await expectIdle(member);
    const after = await complete({
      url: proxy.url,
      requestId: "after",
      promptTokens: prompts[1] ?? [],
      maxTokens: 16,
    });
    expect(after.tokens).toEqual(expected[1]);
  });
});

describe("a client with HTTP to both instances", () => {
  it("cannot have the KV of one prompt used for another one, nor use it twice, and later users get their own text", async () => {
    const { prompts, expected } = await preparedRun();
    const both = await pair();
    const [own, users] = [prompts[0] ?? [], prompts[1] ?? []];
    const numTokens = Math.min(own.length, users.length);
    const params = await prefillLeg(both, own.slice(0, numTokens));
    const ask = (prompt: readonly number[], kv_transfer_params?: object) =>
      post(both.decode.url, { prompt, max_tokens: 16, ignore_eos: true, kv_transfer_params });
    for (const code of ["KV_PROMPT_MISMATCH", "KV_REFERENCE_USED"]) {
      const refused = await ask(users.slice(0, numTokens), params);
      expect(refused).toMatchObject({ status: 400, body: { error: { code } } });
    }
    for (let user = 0; user < 3; user++) {
      const answer = await ask(users, user === 0 ? undefined : await prefillLeg(both, users));
      expect(answer.body.choices?.[0]?.token_ids).toEqual(expected[1]);
    }
    for (const { url } of [both.prefill, both.decode])
      await expectIdle({ name: "", url, backend: null });
  });
});

describe("a decode request with a placeholder for the prompt, as in the example of vllm-neuron's issue 26", () => {
  it("is refused with both numbers of tokens, and frees the blocks of the prefill instance", async () => {
    const { prompts } = await preparedRun();
    const both = await pair();
    const params = await prefillLeg(both, (prompts[0] ?? []).slice(0, 42));
    const answer = await post(both.decode.url, {
      prompt: [1, 2, 3, 4],
      max_tokens: 16,
      kv_transfer_params: params,
    });
    expect(answer).toMatchObject({
      status: 400,
      body: {
        error: {
          code: "KV_REQUEST_INVALID",
          message: expect.stringMatching(
            /remote_num_tokens is 42, and the prompt has 4 tokens/,
          ) as string,
        },
      },
    });
    for (const { url } of [both.prefill, both.decode])
      await expectIdle({ name: "", url, backend: null });
  });

  it("continues the prefill worker's prompt when a chat names it in kv_transfer_params.prompt_token_ids", async () => {
    const { prompts, expected } = await preparedRun();
    const both = await pair();
    const prompt = prompts[0] ?? [];
    const params = await prefillLeg(both, prompt);
    const ask = async (prompt_token_ids: unknown) => {
      const response = await fetch(`${both.decode.url}/v1/chat/completions`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({
          messages: [{ role: "user", content: "placeholder" }],
          max_tokens: 16,
          temperature: 0,
          ignore_eos: true,
          return_token_ids: true,
          kv_transfer_params: { ...params, prompt_token_ids },
        }),
      });
      return { status: response.status, body: (await response.json()) as Answer };
    };
    expect((await ask("1 2 3")).status).toBe(400);
    const again = await prefillLeg(both, prompt);
    Object.assign(params, again);
    expect((await ask(prompt)).body.choices?.[0]?.token_ids).toEqual(expected[0]);
    const records = await fetchRecords(both.decode.url);
    expect(records.filter(({ direction }) => direction === "received")).toHaveLength(1);
    for (const { url } of [both.prefill, both.decode])
      await expectIdle({ name: "", url, backend: null });
  });
});

describe("a transfer that fails", () => {
  it("fails the request with its code, and frees the blocks on both sides", async () => {
    const { prompts, expected } = await preparedRun();
    const { network, prefill, decode } = await pair();
    const prompt = prompts[0] ?? [];
    const params = await prefillLeg({ network, prefill, decode, close: async () => {} }, prompt);
    network.setFaults([{ fault: "fail", operation: "READ", times: 1 }]);
    const failed = await post(decode.url, { prompt, max_tokens: 16, kv_transfer_params: params });
    expect(failed).toMatchObject({ status: 500, body: { error: { code: "KV_TRANSFER_FAILED" } } });
    network.setFaults([]);
    for (const { url } of [prefill, decode]) await expectIdle({ name: "", url, backend: null });
    const alone = await post(decode.url, { prompt, max_tokens: 16 });
    expect(alone.body.choices?.[0]?.token_ids).toEqual(expected[0]);
  });

  it("makes the decode instance compute the prompt under the policy recompute", async () => {
    const { prompts, expected } = await preparedRun();
    const both = await pair({ kv_load_failure_policy: "recompute" });
    const prompt = prompts[0] ?? [];
    const params = await prefillLeg(both, prompt);
    both.network.setFaults([{ fault: "fail", operation: "READ", times: 1 }]);
    const { body } = await post(both.decode.url, {
      prompt,
      max_tokens: 16,
      kv_transfer_params: params,
    });
    expect(body.choices?.[0]?.token_ids).toEqual(expected[0]);
    for (const { url } of [both.prefill, both.decode])
      await expectIdle({ name: "", url, backend: null });
  });

  it.each([
    ["a string", "0"],
    ["no list of lists", [1, 2]],
    ["a block that is not there", [[1_000_000]]],
  ])("refuses remote_block_ids that are %s", async (_what, remote_block_ids) => {
    const { prompts } = await preparedRun();
    const both = await pair();
    const prompt = prompts[0] ?? [];
    const params = await prefillLeg(both, prompt);
    const answer = await post(both.decode.url, {
      prompt,
      max_tokens: 16,
      kv_transfer_params: { ...params, remote_block_ids },
    });
    expect(answer.status).toBeGreaterThanOrEqual(400);
    expect(answer.body.error?.code).toMatch(/^KV_/);
    await expectIdle({ name: "", url: both.decode.url, backend: null });
  });
});
