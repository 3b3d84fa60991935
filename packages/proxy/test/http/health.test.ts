import { type Answer, decodeOk, prefillOk, sendJson } from "@kv/testing/http/fake-upstream";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import { runPair, runProxy, upstream, upstreams } from "../support/set-up.js";

const healthy =
  (answer: Answer): Answer =>
  (seen) =>
    seen.path === "/health" ? sendJson(seen.response, {}) : answer(seen);
const [HEALTHY_P, HEALTHY_D] = [healthy(prefillOk), healthy(decodeOk)];

test("/health is 503 as soon as the last instance of a role is dead, without a round of checks or a request", async () => {
  const clock = manualClock();
  const { p, d, url } = await runPair(
    { p: HEALTHY_P, d: HEALTHY_D },
    { clock, health: { intervalMs: 60_000 } },
  );
  const health = async () => {
    const response = await fetch(`${url}/health`);
    return [response.status, (await response.json()) as object];
  };
  expect(await health()).toEqual([
    200,
    { status: "ok", prefill_instances: 1, decode_instances: 1, paired: true },
  ]);
  const asked = () => [p, d].map(({ seen }) => seen.length);
  const before = asked();
  // Instances that were just seen are not asked again.
  for (let index = 0; index < 5; index++) await health();
  expect(asked()).toEqual(before);
  await d.close();
  clock.advance(1_001);
  expect(await health()).toMatchObject([503, { decode_instances: 0 }]);
  await upstream(HEALTHY_D, Number(new URL(d.url).port));
  clock.advance(1_001);
  expect(await health()).toMatchObject([200, { decode_instances: 1 }]);
});

test("an instance whose name does not resolve is not available; so is one that is added later", async () => {
  const [p, d] = await upstreams(HEALTHY_P, HEALTHY_D);
  const { url, proxy } = await runProxy({
    prefillers: [p.url],
    decoders: ["no-such-host.invalid:8200"],
    health: { intervalMs: 60_000 },
  });
  expect((await fetch(`${url}/health`)).status).toBe(503);
  expect(proxy.status().decoders[0]).toMatchObject({
    available: false,
    state: "unreachable",
    requests: 0,
  });
  proxy.instances.decode.add({ url: "http://another.invalid:8200" });
  proxy.instances.decode.add({ url: d.url });
  await expect
    .poll(() => proxy.status().decoders.map(({ available }) => available))
    .toEqual([false, false, true]);
  expect((await fetch(`${url}/health`)).status).toBe(200);
});

test("/health is 503 while no available instances fit one another", async () => {
  const [p, d] = await upstreams(HEALTHY_P, HEALTHY_D);
  const { url } = await runProxy({
    prefillers: [{ url: p.url, label: "a" }],
    decoders: [{ url: d.url, label: "b" }],
    pairing: { mode: "label" },
  });
  const response = await fetch(`${url}/health`);
  expect([response.status, await response.json()]).toMatchObject([
    503,
    { paired: false, decode_instances: 1 },
  ]);
});
