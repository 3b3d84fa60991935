import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { type Answer, decodeOk, KV_PARAMS_TEXT } from "@kv/testing/http/fake-upstream";
import { startSideChannel } from "@kv/testing/http/side-channel";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, onTestFinished, test } from "vitest";
import { parseAllDocuments } from "yaml";
import { isRelease } from "../support/releases.js";
import { runPair, runProxy, upstreams } from "../support/set-up.js";

const usage = '{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":25}}';

/** An instance whose answers are held until `release`. */
function holding(answerOne: Answer) {
  const held: (() => void)[] = [];
  const hold: Answer = (seen) => {
    if (seen.path === "/v1/completions" && !isRelease(seen)) held.push(() => void answerOne(seen));
    else seen.response.writeHead(404).end();
  };
  return { held, hold, release: () => held.shift()?.() };
}
/** A P whose answers name the side channel at this port. */
const heldPrefill = (port: number) =>
  holding(({ response }) => {
    const params = KV_PARAMS_TEXT.replace("5600", String(port));
    response.writeHead(200, { "content-type": "application/json" });
    response.end(`{"choices":[{"text":"x"}],"usage":${usage},"kv_transfer_params":${params}}`);
  });

test("prefill legs that wait, KV that is not read yet with its bytes and age, and load per decode instance", async () => {
  const clock = manualClock();
  const side = await startSideChannel(() => ({ engineId: "e", vllmVersion: "0.33.0" }));
  onTestFinished(side.close);
  const prefill = heldPrefill(side.port);
  const decode = holding(decodeOk);
  const [p, d] = await upstreams(prefill.hold, decode.hold);
  const kv = { host: "127.0.0.1", port: side.port, tpSize: 1 };
  const { ask, metrics, proxy } = await runProxy({
    prefillers: [{ url: p.url, kv }],
    decoders: [{ url: d.url, kv }],
    pairing: { mode: "strict" },
    clock,
  });
  const asked = [1, 2, 3].map(() => ask());
  const signals = () => proxy.status().signals;
  await expect.poll(() => prefill.held.length).toBe(3);
  expect(signals()).toMatchObject({
    prefill_waiting: 2,
    kv_unread: { count: 0, bytes: 0 },
    decode_in_flight: 0,
  });
  prefill.release();
  prefill.release();
  await expect.poll(() => decode.held.length).toBe(2);
  clock.advance(1500);
  // Two blocks in each of the four regions of the handshake.
  const blockBytes = 32_768;
  expect(signals()).toMatchObject({
    prefill_waiting: 0,
    kv_unread: { count: 2, bytes: 2 * 2 * 4 * blockBytes, oldest_ms: 1500 },
    decode_in_flight: 2,
    prefix_hit_rate: 0.25,
  });
  const shown = (await metrics()).split("\n");
  for (const line of [
    "kv_proxy_kv_unread 2",
    "kv_proxy_kv_unread_oldest_seconds 1.5",
    "kv_proxy_prefill_waiting 0",
    "kv_proxy_decode_in_flight 2",
    "kv_proxy_prefix_hit_ratio 0.25",
    "kv_proxy_prompt_tokens_total 200",
    "kv_proxy_cached_prompt_tokens_total 50",
  ])
    expect(shown).toContain(line);
  prefill.release();
  await expect.poll(() => decode.held.length).toBe(3);
  for (let index = 0; index < 3; index++) decode.release();
  await Promise.all(asked);
  expect(signals()).toMatchObject({
    kv_unread: { count: 0, bytes: 0, oldest_ms: 0 },
    decode_in_flight: 0,
  });
});

test("the KEDA example asks for metrics that exist", async () => {
  const file = fileURLToPath(new URL("../../deploy/keda.yaml", import.meta.url));
  const documents = parseAllDocuments(readFileSync(file, "utf8")).map(
    (document) => document.toJS() as { spec: { triggers: { metadata: { query: string } }[] } },
  );
  const queries = documents.flatMap(({ spec }) =>
    spec.triggers.map(({ metadata }) => metadata.query),
  );
  const shown = await (await runPair()).metrics();
  expect(queries).toHaveLength(4);
  for (const query of queries)
    expect(shown).toContain(`# TYPE ${/kv_proxy_\w+/.exec(query)?.[0]} gauge`);
});

test("the recommended number of prefill instances follows the time that prompts took, and says why", async () => {
  const clock = manualClock();
  const prefill = heldPrefill(5600);
  const { ask, proxy } = await runPair({ p: prefill.hold }, { clock });
  expect(proxy.status().signals.recommended).toBeNull();
  for (let round = 0; round < 5; round++) {
    const asked = ask();
    await expect.poll(() => prefill.held.length).toBe(1);
    clock.advance(9_000);
    prefill.release();
    await asked;
    clock.advance(1_000);
  }
  const { recommended } = proxy.status().signals;
  expect(recommended).toMatchObject({ prefill: 2, decode: 1 });
  expect(recommended?.reason).toMatch(
    /^prompts of the last \d+ s kept [\d.]+ prefill instances busy; 2 are busy for \d+ % of the time, 1 are available$/,
  );
  // After five minutes without prompts there is nothing to recommend by.
  clock.advance(301_000);
  expect(proxy.status().signals.recommended).toBeNull();
});
