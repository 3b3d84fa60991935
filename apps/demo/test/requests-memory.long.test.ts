// A long suite: requests of all kinds in memory. The suites of @kv/pull and @kv/push have what
// their transfers refuse, and what happens when these fail.

import { jsonLog } from "@kv/fleet/front-end";
import { describe, expect, it, onTestFinished } from "vitest";
import { fetchRecords } from "../src/run/check-run.js";
import { complete } from "../src/run/completion-client.js";
import { expectIdle, preparedRun, startPair } from "./support/matrix.js";
import { type Answer, memoryPair, post, prefillLeg } from "./support/memory-pair.js";

async function open<T extends { close(): Promise<void> }>(opening: Promise<T>): Promise<T> {
  const opened = await opening;
  onTestFinished(() => opened.close());
  return opened;
}
const cluster = (connector = "NixlConnector") =>
  open(
    startPair(
      { connector, leaseSeconds: 3 },
      { log: jsonLog("error", process.stderr), logLevel: "error" },
    ),
  );

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

it.each(["NixlConnector", "push"])(
  "a pair holds nothing after clients disconnected at any moment, and continues, with %s",
  async (connector) => {
    const { prompts, expected } = await preparedRun();
    const { proxy, prefills, decodes } = await cluster(connector);
    const { url } = proxy;
    const outcomes = await Promise.all(
      Array.from({ length: 24 }, async (_, i) => {
        // The aborts are spread over the phases of a request: queue, prefill, transfer, decode.
        const signal = AbortSignal.timeout(1 + i * 12);
        const promptTokens = [...(prompts[i % prompts.length] ?? []), 100 + i];
        const request = { url, requestId: `gone-${i}`, promptTokens, maxTokens: 400, signal };
        return complete(request).then(
          () => "complete",
          () => "gone",
        );
      }),
    );
    expect(outcomes).toContain("gone");
    await expectIdle(...prefills, ...decodes);
    const after = { url, requestId: "after", promptTokens: prompts[1] ?? [], maxTokens: 16 };
    expect((await complete(after)).tokens).toEqual(expected[1]);
  },
);

describe("a client with HTTP to both instances", () => {
  it("cannot have the KV of one prompt used for another one, nor use it twice, and later users get their own text", async () => {
    const { prompts, expected } = await preparedRun();
    const both = await open(memoryPair());
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
    await expectIdle(both.prefill, both.decode);
  });

  it("continues the prefill worker's prompt when a chat names it in kv_transfer_params.prompt_token_ids", async () => {
    const { prompt, answer } = await preparedRun();
    const both = await open(memoryPair());
    const ask = async (prompt_token_ids: unknown) => {
      const messages = [{ role: "user", content: "placeholder" }];
      const kv_transfer_params = { ...(await prefillLeg(both, prompt)), prompt_token_ids };
      const body = { messages, max_tokens: 16, kv_transfer_params };
      return post(both.decode.url, body, {}, "/v1/chat/completions");
    };
    expect((await ask("1 2 3")).status).toBe(400);
    expect((await ask(prompt)).body.choices?.[0]?.token_ids).toEqual(answer);
    const records = await fetchRecords(both.decode.url);
    expect(records.filter(({ direction }) => direction === "received")).toHaveLength(1);
    await expectIdle(both.prefill, both.decode);
  });
});
