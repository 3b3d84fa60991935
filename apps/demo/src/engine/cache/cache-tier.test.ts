import { nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { afterEach, describe, expect, it, vi } from "vitest";
import { arithmeticModel } from "../../../test/support/arithmetic-model.js";
import { Engine } from "../engine.js";
import { BlockPool, type CacheChange } from "./block-pool.js";
import { CacheTier } from "./cache-tier.js";
import { KvPool } from "./kv-pool.js";

const BLOCK = 4;
const PROMPT = Array.from({ length: 50 }, (_, at) => (at * at * 7 + 31) % 990);
const network = memoryNetwork();
let hosts = 0;

const TRANSPORTS = {
  "the memory transport": () => {
    hosts += 1;
    return memoryTransport({ network, host: `host-${hosts}` });
  },
  NIXL: () => nixlTransport(),
};

const open: { close(): Promise<void> }[] = [];
afterEach(async () => {
  for (const { close } of open.splice(0).reverse()) await close();
  expect(Object.values(network.outstanding()).reduce((sum, held) => sum + held, 0)).toBe(0);
});

async function member(
  kind: keyof typeof TRANSPORTS = "the memory transport",
  { tp = 1, numBlocks = 64, model: name = "m" } = {},
) {
  const transport = TRANSPORTS[kind]();
  const model = arithmeticModel();
  const pool = new KvPool({ transport, geometry: model.config, numBlocks, blockSize: BLOCK, tp });
  const changes: CacheChange[] = [];
  const blocks = new BlockPool({ numBlocks, onChange: (change) => void changes.push(change) });
  const at = { transport, host: "127.0.0.1", port: 0, promptBlocks: 20 };
  const tier = await CacheTier.open({ ...at, pool, blocks, model: name });
  const engine = new Engine({ model, pool, blocks, tier });
  open.push({
    async close() {
      await engine.close();
      expect(blocks.held).toBe(0);
      await tier.close();
      expect(tier.servedBlocks).toBe(0);
      pool.close();
      await transport.close();
    },
  });
  const ask = (source?: string, prompt: readonly number[] = PROMPT) => {
    hosts += 1;
    const [, remote_host, port] = /^(.*):(\d+)$/.exec(source ?? "") ?? [];
    const remote_kv_source = { kv_request_id: "one", remote_host, remote_port: Number(port) };
    return engine.submit({
      requestId: `request-${hosts}`,
      promptTokens: prompt,
      maxTokens: 4,
      kvTransferParams: source === undefined ? undefined : { remote_kv_source },
    });
  };
  return { tier, engine, model, blocks, changes, ask };
}

describe.each(Object.keys(TRANSPORTS) as (keyof typeof TRANSPORTS)[])("over %s", (kind) => {
  it.skipIf(kind === "NIXL" && nixlMissing !== undefined).each([
    [1, 1],
    [2, 4],
  ])("an engine of TP %i has what one of TP %i computed, and computes the rest", async (to, of) => {
    const [a, b] = [await member(kind, { tp: of }), await member(kind, { tp: to })];
    const first = await a.ask().done;
    const second = await b.ask(a.tier.localId).done;
    expect(second.tokens).toEqual(first.tokens);
    expect(second.tokens).toEqual(a.model.generate(PROMPT, 4));
    expect(second.cachedTokens).toBe(48);
    expect(b.model.calls[0]).toMatchObject({ position: 48, pastTokens: 48 });
    // What it fetched is its own, and served in turn.
    expect(b.changes[0]).toMatchObject({ first: 0, stored: { length: 12 } });
    const third = await (await member(kind)).ask(b.tier.localId).done;
    expect(third).toMatchObject({ tokens: first.tokens, cachedTokens: 48 });
  });
});

it("fetches only what it lacks, and what fits into its cache", async () => {
  const [a, b] = [await member(), await member("the memory transport", { numBlocks: 16 })];
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
  const [a, b] = [await member("the memory transport", options), await member()];
  if ("model" in options) await a.ask().done;
  const answer = await b.ask(a.tier.localId).done;
  expect(answer).toMatchObject({ tokens: b.model.generate(PROMPT, 4), cachedTokens: 0 });
});

it("a request that is aborted ends its fetch, and holds nothing", async () => {
  const [a, b] = [await member(), await member()];
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
  const { engine } = await member();
  const request = { requestId: "r", promptTokens: PROMPT, maxTokens: 1 };
  const remote_kv_source = { remote_host: "a b", remote_port: 1 };
  expect(() => engine.submit({ ...request, kvTransferParams: { remote_kv_source } })).toThrow(
    expect.objectContaining({ code: "KV_REQUEST_INVALID" }),
  );
});
