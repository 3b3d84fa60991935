import { createProxy } from "@kv/proxy";
import { sendJson, startUpstream } from "@kv/testing/http/fake-upstream";
import { held } from "@kv/testing/nothing-left";
import { blockHashes, offloadKey } from "@kv/tier";
import { memoryNetwork } from "@kv/transport-memory";
import { expect, it, onTestFinished } from "vitest";
import { planInstances } from "../src/cluster/cluster-plan.js";
import { PAIR } from "./support/matrix.js";
import { post, startInMemory } from "./support/memory-pair.js";

const PROMPT = Array.from({ length: 100 }, (_, at) => (at * 7 + 5) % 90);

const peerOf = (instance: { status(): object }) =>
  (instance.status() as { readonly p2p_tier: { readonly peer_id: string } }).p2p_tier.peer_id;

it("an instance fetches what a request's remote_kv_source has, as P and alone", async () => {
  const network = memoryNetwork();
  const { prefills } = planInstances({ ...PAIR, prefills: 2, prefillInstance: { tierPort: 0 } });
  const [a, b] = await Promise.all(
    prefills.map(({ name, config }) => startInMemory(name, config, network)),
  );
  if (a === undefined || b === undefined) throw new Error("no instances are planned");
  onTestFinished(async () => {
    await Promise.all([a.close(), b.close()]);
    expect(held(network.outstanding())).toEqual({});
  });
  const [remote_host = "", port] = peerOf(a).split(":");
  const remote_kv_source = { kv_request_id: "one", remote_host, remote_port: Number(port) };
  const first = await post(a.url, { prompt: PROMPT, max_tokens: 4 });
  const alone = { prompt: PROMPT.slice(0, 48), max_tokens: 1 };
  const warm = await post(b.url, {
    ...alone,
    model: null,
    kv_transfer_params: { remote_kv_source },
  });
  expect(warm).toMatchObject({ status: 200 });
  const { body } = await post(b.url, {
    prompt: PROMPT,
    max_tokens: 1,
    kv_transfer_params: { do_remote_decode: true, remote_kv_source },
  });
  expect(body.kv_transfer_params).toMatchObject({ remote_prefill_cached_tokens: 96 });
  expect(body.choices?.[0]?.token_ids).toEqual(first.body.choices?.[0]?.token_ids.slice(0, 1));
  expect(b.metrics()).toMatch(/cached_by_source_total\{[^}]*source="p2p"[^}]*\} 80/);
});

it.each([
  ["has the prompt", "m", true, 96],
  ["has nothing of it", "m", false, 0],
  ["has that of another model", "other", true, 0],
])("behind a router that was told of a source that %s, the answer is right", async (...given) => {
  const [, model, holds, cachedTokens] = given;
  const network = memoryNetwork();
  const { prefills, decodes } = planInstances({
    ...PAIR,
    prefills: 2,
    prefillInstance: { tierPort: 0 },
  });
  const start = (planned: (typeof prefills)[number] | undefined, servedModelName: string) =>
    startInMemory(planned?.name ?? "", { ...planned?.config, servedModelName }, network);
  const [source, p, d] = [
    await start(prefills[0], model),
    await start(prefills[1], "m"),
    await start(decodes[0], "m"),
  ];
  const { body: expected } = await post(d.url, { prompt: PROMPT, max_tokens: 4 });
  if (holds) await post(source.url, { prompt: PROMPT, max_tokens: 1 });
  const keys = blockHashes(PROMPT, { blockSize: 16 }).map((hash) => offloadKey(hash));
  const content = {
    peer_id: peerOf(source),
    draining: false,
    hash_seed: "vllm-none-hash",
    hash_algorithm: "sha256",
    block_size: 16,
    blocks_per_chunk: 1,
    epoch: "1",
    next: keys.length,
    more: false,
    changes: keys.map((key) => `+${Buffer.from(key).toString("base64")}`),
  };
  const pool = await startUpstream(({ response }) => sendJson(response, content));
  const proxy = createProxy({
    prefillers: [p.url],
    decoders: [d.url],
    kvSources: { pools: [pool.url] },
    pairing: { mode: "off" },
  });
  const { url } = await proxy.listen({ port: 0 });
  onTestFinished(async () => {
    await proxy.close({ graceMs: 0 });
    await pool.close();
    for (const each of [d, p, source]) await each.close();
    expect(held(network.outstanding())).toEqual({});
  });
  await expect.poll(() => proxy.status().kv_pools).toMatchObject([{ unused: null, blocks: 6 }]);
  const { status, body } = await post(url, { prompt: PROMPT, max_tokens: 4 });
  expect(status).toBe(200);
  expect(body.choices?.[0]?.token_ids).toEqual(expected.choices?.[0]?.token_ids);
  const fetched = new RegExp(`cached_by_source_total\\{[^}]*source="p2p"[^}]*\\} ${cachedTokens}`);
  expect(p.metrics()).toMatch(fetched);
  const left = (each: { status(): object }) =>
    (each.status() as { readonly outstanding: { readonly blocks: number } }).outstanding.blocks;
  await expect.poll(() => [source, p, d].map(left)).toEqual([0, 0, 0]);
});
