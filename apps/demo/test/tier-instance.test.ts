import { memoryNetwork } from "@kv/transport-memory";
import { expect, it, onTestFinished } from "vitest";
import { planInstances } from "../src/cluster/cluster-plan.js";
import { PAIR } from "./support/matrix.js";
import { post, startInMemory } from "./support/memory-pair.js";

const PROMPT = Array.from({ length: 100 }, (_, at) => (at * 7 + 5) % 90);

it("an instance fetches what a request's remote_kv_source has, as P and alone", async () => {
  const network = memoryNetwork();
  const { prefills } = planInstances({ ...PAIR, prefills: 2, prefillInstance: { tierPort: 0 } });
  const [a, b] = await Promise.all(
    prefills.map(({ name, config }) => startInMemory(name, config, network)),
  );
  if (a === undefined || b === undefined) throw new Error("no instances are planned");
  onTestFinished(async () => {
    await Promise.all([a.close(), b.close()]);
    expect(Object.values(network.outstanding()).reduce((sum, held) => sum + held, 0)).toBe(0);
  });
  const { p2p_tier: tier } = a.status() as { readonly p2p_tier: { readonly peer_id: string } };
  const [remote_host = "", port] = tier.peer_id.split(":");
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
