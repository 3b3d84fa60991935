import { decodeOk, prefillOk } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { runProxy, upstream } from "../support/set-up.js";
import { vllmPair } from "../support/vllm-stub.js";

/**
 * What several kv-proxy behind a load balancer share, and what not: docs/operate/fleet-sizes.md.
 */
test("two replicas share nothing and need not: requests, aborts and freed blocks are of one replica each", async () => {
  const stub = vllmPair();
  const p = await upstream(stub.prefill);
  let hold = true;
  const d = await upstream((seen) => (hold ? undefined : stub.decode(seen)));
  const settings = { prefillers: [p.url], decoders: [d.url] };
  const [one, two] = [await runProxy(settings), await runProxy(settings)];
  const gone = new AbortController();
  const left = one.ask({ prompt: "first" }, { signal: gone.signal });
  const kept = two.ask({ prompt: "second" });
  await expect.poll(() => d.seen.length).toBe(2);
  expect(stub.held.size).toBe(2);
  gone.abort();
  await expect(left).rejects.toThrow();
  const leg = d.seen.find(({ json }) => json.prompt === "first");
  await leg?.dropped;
  hold = false;
  // The other replica's request goes on.
  const other = d.seen.find(({ json }) => json.prompt === "second");
  if (other !== undefined) void stub.decode(other);
  expect((await kept).status).toBe(200);
  expect(stub.counts).toMatchObject({ garbage: 0, unknownFrees: 0 });
  await expect.poll(() => one.proxy.status().requests.aborted).toBe(1);
  expect(two.proxy.status().requests).toMatchObject({ aborted: 0, succeeded: 1, total: 1 });
});

test("an instance that is added at one replica is not known to the other; the load at one is not seen by the other", async () => {
  const p = await upstream(prefillOk);
  const held: Parameters<typeof decodeOk>[0][] = [];
  const d = await upstream((seen) => void held.push(seen));
  const added = await upstream(decodeOk);
  const routing = { decode: "least-load" } as const;
  const settings = { prefillers: [p.url], decoders: [d.url], routing };
  const [one, two] = [await runProxy(settings), await runProxy(settings)];
  one.proxy.instances.decode.add({ url: added.url });
  const first = one.ask();
  await expect.poll(() => held.length).toBe(1);
  // It sees its own load, and takes the other instance.
  expect((await one.ask()).status).toBe(200);
  expect(two.proxy.status().decoders).toMatchObject([{ url: d.url, in_flight: 0 }]);
  const second = two.ask();
  await expect.poll(() => held.length).toBe(2);
  for (const seen of held) void decodeOk(seen);
  expect([(await first).status, (await second).status]).toEqual([200, 200]);
});

test("sessions go to the same instance from both replicas, in whatever order the instances are named", async () => {
  const p = await upstream(prefillOk);
  const ds = [await upstream(decodeOk), await upstream(decodeOk), await upstream(decodeOk)];
  const urls = ds.map(({ url }) => url);
  const routing = { decode: "session-affinity" } as const;
  const replicas = [
    await runProxy({ prefillers: [p.url], decoders: urls, routing }),
    await runProxy({ prefillers: [p.url], decoders: [...urls].reverse(), routing }),
  ];
  for (let session = 0; session < 8; session += 1) {
    const before = ds.map(({ seen }) => seen.length);
    for (const { ask } of replicas) await ask({ session_id: `s${session}` });
    const went = ds.map(({ seen }, at) => seen.length - (before[at] ?? 0));
    expect([...went].sort()).toEqual([0, 0, 2]);
  }
});
