import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, it, vi } from "vitest";
import { tierMember, transportOf } from "../../../test/support/tier-member.js";
import { PROMPT } from "../../../test/support/tier-prompt.js";

describe.each(["memory", "NIXL"] as const)("over %s", (kind) => {
  it.skipIf(kind === "NIXL" && nixlMissing !== undefined).each([
    [1, 1],
    [2, 4],
  ])("an engine of TP %i has what one of TP %i computed, and computes the rest", async (to, of) => {
    const member = (options: object) => tierMember({ transport: transportOf(kind), ...options });
    const [a, b] = [await member({ tp: of }), await member({ tp: to })];
    const first = await a.ask().done;
    const second = await b.ask(a.tier.localId).done;
    expect(second.tokens).toEqual(first.tokens);
    expect(second.tokens).toEqual(a.model.generate(PROMPT, 4));
    expect(second.cachedTokens).toBe(48);
    expect(b.model.calls[0]).toMatchObject({ position: 48, pastTokens: 48 });
    // What it fetched is its own, and served in turn.
    expect(b.changes[0]).toMatchObject({ first: 0, stored: { length: 12 } });
    const third = await (await member({})).ask(b.tier.localId).done;
    expect(third).toMatchObject({ tokens: first.tokens, cachedTokens: 48 });
  });
});

it("fetches only what it lacks, and what fits into its cache", async () => {
  const [a, b] = [await tierMember(), await tierMember({ numBlocks: 16 })];
  await a.ask().done;
  await b.ask(undefined, PROMPT.slice(0, 20)).done;
  b.changes.length = 0;
  expect(await b.ask(a.tier.localId).done).toMatchObject({ cachedTokens: 48 });
  expect(b.changes.find((change) => "stored" in change)).toMatchObject({ first: 5 });

  // Each needs nearly all blocks.
  const prompts = [1, 2, 3].map((more) => PROMPT.map((token) => token + more));
  for (const prompt of prompts) await a.ask(undefined, prompt).done;
  const answers = await Promise.all(prompts.map((prompt) => b.ask(a.tier.localId, prompt).done));
  expect(answers.map(({ tokens }) => tokens)).toEqual(
    prompts.map((prompt) => a.model.generate(prompt, 4)),
  );
});

it.each([
  ["has nothing of it", {}],
  ["serves another model", { model: "other" }],
])("computes what a source does not bring that %s", async (_, options) => {
  const [a, b] = [await tierMember(options), await tierMember()];
  if ("model" in options) await a.ask().done;
  const answer = await b.ask(a.tier.localId).done;
  expect(answer).toMatchObject({ tokens: b.model.generate(PROMPT, 4), cachedTokens: 0 });
});

it("a request that is aborted ends its fetch, and holds nothing", async () => {
  const [a, b] = [await tierMember(), await tierMember()];
  await a.ask().done;
  vi.spyOn(a.blocks, "lookup").mockImplementation(() => {
    handle.abort();
    return [];
  });
  const handle = b.ask(a.tier.localId);
  await expect(handle.done).rejects.toMatchObject({ code: "KV_REQUEST_ABORTED" });
  expect(b.engine.outstanding()).toMatchObject({ waiting: 0, blocks: 0 });
  vi.restoreAllMocks();
  expect(await b.ask(a.tier.localId).done).toMatchObject({ cachedTokens: 48 });
});

it("refuses a source that is none", async () => {
  const { engine } = await tierMember();
  const request = { requestId: "r", promptTokens: PROMPT, maxTokens: 1 };
  const remote_kv_source = { remote_host: "a b", remote_port: 1 };
  expect(() => engine.submit({ ...request, kvTransferParams: { remote_kv_source } })).toThrow(
    expect.objectContaining({ code: "KV_REQUEST_INVALID" }),
  );
});
