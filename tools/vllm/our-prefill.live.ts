import { readFileSync } from "node:fs";
import { join } from "node:path";
import { createProxy } from "@kv/proxy";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { decode, plain, prefill } from "./completion.js";
import { handshakeTimeouts, onceMoreAfterTimeout } from "./once-more.js";
import { type OurPrefill, type OurPrefillOptions, openOurPrefill } from "./our-prefill.js";
import { PEER_DIR, showLogs, startVllm, type VllmServer } from "./server.js";
import { prompt, TINY } from "./tiny-peer.js";
import { until } from "./until.js";

// A real vLLM decode worker goes on from KV that our own engine computed from the same weights.

const PROMPT_TOKENS = 100;
const OUTPUT_TOKENS = 16;
/** Longer than the tests: what is freed before is freed because the peer said so. */
const LEASE_SECONDS = 600;

/** What Hugging Face transformers makes of the prompt: neither vLLM nor ours. */
const reference = JSON.parse(readFileSync(join(PEER_DIR, "tiny-qwen3", "hf_ref.json"), "utf8")) as {
  prompt: number[];
  hf_greedy16: number[];
};

let d: VllmServer;
let p: OurPrefill | undefined;

afterEach(async () => {
  await p?.instance.close();
  p = undefined;
});
beforeEach(({ onTestFailed }) => onTestFailed(() => showLogs(d)));

async function open(options: Partial<OurPrefillOptions> = {}): Promise<OurPrefill> {
  p = await openOurPrefill({ leaseSeconds: LEASE_SECONDS, ...options });
  return p;
}

const firstBlocks = (params: Readonly<Record<string, unknown>>) =>
  (params.remote_block_ids as number[][])[0] ?? [];

/** Prefills on a fresh prefill side of ours and decodes on the peer, with what `between` does in the meantime. */
async function acrossOnce(
  options: Partial<OurPrefillOptions>,
  between: (ours: OurPrefill, params: Readonly<Record<string, unknown>>) => void = () => {},
) {
  await p?.instance.close();
  const ours = await open(options);
  const tokens = prompt(PROMPT_TOKENS);
  const params = await prefill(ours.url, tokens);
  expect(ours.held()).toBe(Math.ceil(PROMPT_TOKENS / (options.blockSize ?? TINY.blockSize)));
  between(ours, params);
  return { ours, params, made: await decode(d.url, tokens, OUTPUT_TOKENS, params) };
}

const across: typeof acrossOnce = (...given) =>
  onceMoreAfterTimeout(() => acrossOnce(...given), handshakeTimeouts(d));

/** Pulled by all of the decode worker's ranks, our engine's tokens made, our blocks freed. */
async function expectServed(ourTp: number, options: Partial<OurPrefillOptions> = {}): Promise<void> {
  const { ours, params, made } = await across({ tp: ourTp, ...options });
  expect(params).toMatchObject({ tp_size: ourTp, remote_num_tokens: PROMPT_TOKENS, transfer_mode: "pull" });
  expect(made).toEqual(reference.hf_greedy16);

  await until(() => ours.held() === 0, "our prefill side has freed the blocks");
  const readersOfRank = Math.max(1, d.tp / ourTp);
  expect(ours.tap.notifications.filter((text) => !text.startsWith("HB:"))).toEqual(
    Array(ourTp * readersOfRank).fill(`${params.remote_request_id}:${readersOfRank}`),
  );
  expect(made).toEqual(await plain(ours.url, prompt(PROMPT_TOKENS), OUTPUT_TOKENS));
}

describe("to vLLM with TP 1", () => {
  beforeAll(async () => {
    d = await startVllm({ name: "d1" });
  });
  afterAll(() => d?.stop());

  test("the prompt is the reference's", () => expect(prompt(PROMPT_TOKENS)).toEqual(reference.prompt));

  test("from our TP 1: our engine's tokens", () => expectServed(1));

  test("from our TP 2: the heads of both our ranks", () => expectServed(2));

  test("from our blocks of 16 tokens into its blocks of 32", () => expectServed(1, { blockSize: 16 }));

  test("an exponent bit flipped at each position of the prompt gives other tokens", async () => {
    const { made } = await across({}, (ours, params) => ours.damage(firstBlocks(params), PROMPT_TOKENS));
    expect(made).toHaveLength(OUTPUT_TOKENS);
    expect(made).not.toEqual(reference.hf_greedy16);
  });

  test("eight prompts at once through our proxy: each has the tokens that one vLLM alone makes", async () => {
    // Paired first, so that eight requests do not wait for one handshake.
    const { ours } = await across({});
    const proxy = createProxy({ prefillers: [ours.url], decoders: [d.url] });
    try {
      const { url } = await proxy.listen({ port: 0 });
      const prompts = [100, 1, 31, 32, 33, 64, 65, 300].map((length, n) =>
        prompt(length).map((token) => ((token + 37 * n) % 1000) + 10),
      );
      const made = await Promise.all(prompts.map((tokens) => plain(url, tokens, OUTPUT_TOKENS)));
      for (const [n, tokens] of prompts.entries()) {
        expect(made[n], `prompt of ${tokens.length} tokens`).toEqual(
          await plain(d.url, tokens, OUTPUT_TOKENS),
        );
      }
      await until(() => ours.held() === 0, "our prefill side has freed all blocks");
    } finally {
      await proxy.close();
    }
  });
});

describe("to vLLM with TP 2", () => {
  beforeAll(async () => {
    d = await startVllm({ name: "d2", tp: 2 });
  });
  afterAll(() => d?.stop());

  test("from our TP 1: two ranks read from ours, which waits for both", () => expectServed(1));

  test("from our TP 2: each rank from its own", () => expectServed(2));

  test("from our TP 1 and blocks of 16 tokens: heads split, and blocks of 32", () =>
    expectServed(1, { blockSize: 16 }));
});
