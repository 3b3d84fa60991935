import { expect, test } from "vitest";
import type { Instance } from "../instances/instance.js";
import { BlockIndex } from "../kv-events/block-index.js";
import { BlockTree } from "../kv-events/block-tree.js";
import { prefixAware } from "./prefix-aware.js";
import { leastLoad, type RoutingContext } from "./routing.js";
import { sessionAffinity } from "./session-affinity.js";

const instance = (url: string, inFlight = 0): Instance => ({ role: "prefill", url, inFlight });
const asking = (fields: Record<string, unknown>, headers = {}): RoutingContext => ({
  requestId: "r",
  headers,
  request: { fields },
});

test("leastLoad chooses the fewest requests in flight, and takes equal instances in turn", () => {
  const [a, b, c] = [instance("a", 2), instance("b", 1), instance("c", 1)];
  const routing = leastLoad();
  const chosen = [1, 2, 3].map(() => routing.choose([a, b, c], asking({}))?.url);
  expect(chosen).toEqual(["b", "c", "b"]);
});

test("sessionAffinity moves a session only when its instance is removed, in whatever order instances are named", () => {
  const all = ["a", "b", "c", "d"].map((url) => instance(url));
  const routing = sessionAffinity();
  const sessions = Array.from({ length: 200 }, (_, at) => `s${at}`);
  const place = (of: readonly Instance[]) =>
    sessions.map((session) => routing.choose(of, asking({}, { "x-session-id": session }))?.url);
  const before = place(all);
  expect(new Set(before).size).toBe(4);
  expect(place(all)).toEqual(before);
  expect(place([...all].reverse())).toEqual(before);
  const after = place(all.filter(({ url }) => url !== "c"));
  for (const [at, url] of before.entries()) if (url !== "c") expect(after[at]).toBe(url);
  expect(routing.choose(all, asking({ user: "s1" }))?.url).toBe(before[1]);
});

test("sessionAffinity places the instances once, also when each request leaves another one out", () => {
  let reads = 0;
  const counted = (url: string): Instance => ({
    ...instance(url),
    get url() {
      reads += 1;
      return url;
    },
  });
  const all = Array.from({ length: 100 }, (_, at) => counted(`i${at}`));
  const routing = sessionAffinity();
  routing.instancesChanged?.(all);
  for (let at = 0; at < 50; at += 1) {
    const context = asking({ user: `u${at}` });
    const first = routing.choose(all, context);
    const second = routing.choose(
      all.filter((one) => one !== first),
      context,
    );
    expect(second === undefined || second === first).toBe(false);
  }
  expect(reads).toBe(all.length);
});

test("prefixAware sends a prompt where its prefix went before, unless that instance is much busier", () => {
  const routing = prefixAware({ chunkLength: 4, maxImbalance: 2 });
  const [a, b] = [instance("a"), instance("b")];
  const first = routing.choose([a, b], asking({ prompt: "system prompt: one" }))?.url;
  for (let round = 0; round < 5; round += 1) {
    expect(routing.choose([a, b], asking({ prompt: `system prompt: ${round}` }))?.url).toBe(first);
  }
  // Another model has another KV cache.
  const other = routing.choose(
    [a, b],
    asking({ model: "other", prompt: "system prompt: one" }),
  )?.url;
  expect(other).not.toBe(first);
  const busy = first === "a" ? [instance("a", 3), b] : [a, instance("b", 3)];
  expect(routing.choose(busy, asking({ prompt: "system prompt: one" }))?.url).not.toBe(first);
});

test("prefixAware hashes no prompt of token ids once the instances that were silent report their caches", () => {
  const all = [instance("a"), instance("b")];
  const reporting = new Set<string>();
  const cached = {
    matchedTokens: ({ url }: Instance) => (reporting.has(url) ? 0 : undefined),
    holders: () => [],
    follow() {},
    close() {},
  };
  const routing = prefixAware({ cached, chunkLength: 4 });
  let hashed = 0;
  const fields = {
    prompt: [1, 2, 3, 4, 5, 6],
    // Read for the hash alone.
    get instructions() {
      hashed += 1;
      return undefined;
    },
  };
  const countOf = () => {
    hashed = 0;
    for (let round = 0; round < 20; round += 1) {
      const context = {
        requestId: "r",
        headers: {},
        request: { fields: Object.create(fields) as Record<string, unknown> },
      };
      const chosen = routing.choose(all, context);
      if (chosen !== undefined) routing.cachedTokens?.(chosen, context, 4);
    }
    return hashed;
  };
  expect(countOf()).toBe(20);
  reporting.add("a");
  expect(countOf()).toBeGreaterThan(0);
  reporting.add("b");
  countOf();
  expect(countOf()).toBe(0);
});

test("prefixAware uses the instances' KV events for prompts of token ids", () => {
  const all = [instance("a"), instance("b"), instance("c")];
  const tree = new BlockTree();
  const index = new BlockIndex(tree, all[1] ?? instance("b"));
  const group = { index: 0, needs: "all" } as const;
  void [
    ...index.stored({
      hashes: ["h1", "h2"],
      parent: undefined,
      tokens: [1, 2, 3, 4],
      blockSize: 2,
      group,
    }),
  ];
  const cached = {
    matchedTokens: (one: Instance, tokens: readonly number[]) =>
      one.url === "b" ? index.matchedTokens(tokens) : 0,
    holders: (tokens: ArrayLike<number>) => tree.holders(tokens),
    follow() {},
    close() {},
  };
  const routing = prefixAware({ cached });
  for (let round = 0; round < 4; round += 1) {
    expect(routing.choose(all, asking({ prompt: [1, 2, 9, 9] }))?.url).toBe("b");
  }
});
