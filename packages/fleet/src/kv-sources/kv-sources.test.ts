import { ambient, YieldingQueue } from "@kv/interface";
import { POOL_PEER, POOL_PROMPT, poolContent } from "@kv/testing/http/pool-content";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import type { Instance } from "../instances/instance.js";
import { parseGenerationRequest } from "../request/generation-request.js";
import type { InstancePool } from "../routing/instance-pool.js";
import { PrefillCosts } from "../routing/prefill-costs.js";
import { KvSources } from "./kv-sources.js";

const request = parseGenerationRequest(
  "/v1/completions",
  Buffer.from(JSON.stringify({ prompt: POOL_PROMPT })),
);
const context = { requestId: "one", request };

interface Stub {
  readonly url: string;
  readonly inFlight: number;
  readonly cached?: number;
  readonly isAvailable?: boolean;
}

const instanceOf = ({ url, inFlight, isAvailable = true }: Stub) =>
  ({ role: "prefill", url, inFlight, available: () => isAvailable }) as unknown as Instance;

function poolOf(stubs: readonly Stub[]) {
  const instances = stubs.map(instanceOf);
  const cached = (instance: Instance) => stubs[instances.indexOf(instance)]?.cached ?? 0;
  const byLoad = () => [...instances].sort((one, other) => one.inFlight - other.inFlight);
  const pool = {
    list: () => instances,
    reports: () => true,
    cachedTokens: cached,
    // As a routing by prefixes.
    choose: () => [...instances].sort((one, other) => cached(other) - cached(one))[0],
    alternatives: (count: number, excluding: ReadonlySet<Instance>) =>
      byLoad()
        .filter((each) => !excluding.has(each))
        .slice(0, count),
  };
  return { pool: pool as unknown as InstancePool, instances };
}

async function sourcesOf(
  stubs: readonly Stub[],
  { pool, tierPort }: { readonly pool?: object; readonly tierPort?: number } = {},
) {
  const clock = manualClock();
  const costs = new PrefillCosts();
  const prefill = poolOf(stubs);
  const sources = new KvSources({
    settings: { pools: pool === undefined ? [] : ["pool:9300"], tierPort },
    pools: { prefill: prefill.pool, decode: poolOf([]).pool },
    costs,
    get: async () => ({ status: 200, body: JSON.stringify(pool) }),
    parses: new YieldingQueue({ clock }),
    ...ambient({ clock }),
  });
  await new Promise((resolve) => setImmediate(resolve));
  return { sources, costs, instances: prefill.instances };
}

const leg = (tokens: number, durationMs: number, more: object = {}) => ({
  request,
  usage: { prompt_tokens: tokens },
  durationMs,
  wasAlone: true,
  ...more,
});

test.each([
  ["every block", 5, 1, 80],
  ["chunks of four blocks", 9, 4, 128],
  ["none", 0, 1, 0],
])("a pool has the tokens of the blocks that it lists: %s", async (_, blocks, perChunk, tokens) => {
  const { sources } = await sourcesOf([], { pool: poolContent(blocks, { perChunk }) });
  const holders = await sources.holders(context);
  expect(holders.map((each) => each.tokens)).toEqual(tokens === 0 ? [] : [tokens]);
  for (const holder of holders)
    expect(JSON.parse(sources.kvTransferParam(holder))).toMatchObject({
      remote_host: "10.0.0.9",
      remote_port: 5710,
    });
  expect(await sources.holders({ requestId: "one" })).toEqual([]);
  sources.close();
});

test("the longest source is named where it has more than the instance, and is quicker than computing", async () => {
  const stubs = [
    { url: "http://a:1", inFlight: 0, cached: 96 },
    { url: "http://b:1", inFlight: 0, cached: 16 },
    { url: "http://c:1", inFlight: 0, cached: 160, isAvailable: false },
  ];
  const { sources, costs, instances } = await sourcesOf(stubs, {
    pool: poolContent(5),
    tierPort: 7777,
  });
  const holders = await sources.holders(context);
  // What leaves, or was ejected, is no source.
  expect(holders.map(({ peer, tokens }) => [peer, tokens])).toEqual([
    ["a:7777", 96],
    [POOL_PEER, 80],
    ["b:7777", 16],
  ]);
  const [a, b] = instances as [Instance, Instance];
  expect(sources.sourceFor(a, context, holders)).toBeUndefined();
  expect(sources.sourceFor(b, context, holders)).toMatchObject({ peer: "a:7777", ownTokens: 16 });

  for (const tokens of [100, 200, 300]) costs.ended(leg(tokens, tokens));
  costs.ended(leg(160, 80 + 60, { cachedTokens: 80, fetchTokens: 80 }));
  expect(costs.fetchMs(1)).toBeCloseTo(0.75);
  expect(sources.sourceFor(b, context, holders)?.peer).toBe("a:7777");
  for (let count = 0; count < 20; count += 1)
    costs.ended(leg(160, 80 + 400, { cachedTokens: 80, fetchTokens: 80 }));
  expect(sources.sourceFor(b, context, holders)).toBeUndefined();
  sources.close();
});

test("a prompt goes to an idle instance that fetches, where the one that has it is busy", async () => {
  const stubs = [
    { url: "http://a:1", inFlight: 3, cached: 80 },
    { url: "http://b:1", inFlight: 0 },
  ];
  const { sources, costs, instances } = await sourcesOf(stubs, { pool: poolContent(5) });
  const holders = await sources.holders(context);
  const sooner = () => sources.soonerThanChosen(context, holders, new Set());
  expect(sooner()).toBeUndefined();
  for (const tokens of [100, 200, 300]) costs.ended(leg(tokens, tokens));
  expect(sooner()).toBe(instances[1]);
  expect(sources.soonerThanChosen(context, [], new Set())).toBeUndefined();
  expect(sources.soonerThanChosen(context, holders, new Set(instances.slice(1)))).toBeUndefined();
  sources.close();
});

test("a prompt stays where it is cached while waiting there is shorter than fetching and computing", async () => {
  const stubs = [
    { url: "http://a:1", inFlight: 1, cached: 144 },
    { url: "http://b:1", inFlight: 0 },
  ];
  const { sources, costs } = await sourcesOf(stubs, { pool: poolContent(1) });
  const holders = await sources.holders(context);
  // 20 ms for a leg, and 1 ms for a token.
  for (let count = 0; count < 20; count += 1) costs.ended(leg(20, 20));
  expect(sources.soonerThanChosen(context, holders, new Set())).toBeUndefined();
  sources.close();
});
