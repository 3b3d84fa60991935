import { ambient } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import type { PooledInstance } from "../instances/pooled-instance.js";
import type { Upstream } from "../upstream/upstream.js";
import type { KvSources } from "./kv-sources.js";
import { WarmStart } from "./warm-start.js";

test("an instance takes load only when all its fetches have ended, also where one fails", async () => {
  const prompt = { model: "m", tokens: Int32Array.of(1, 2), uses: 1 };
  const source = { peer: "10.0.0.9:5710", instance: undefined, tokens: 2, ownTokens: 0 };
  const sources = {
    asked: { mostAsked: () => [prompt, prompt] },
    holders: async () => [source],
    sourceFor: () => source,
    kvTransferParam: () => "{}",
  };
  let endSecond = () => {};
  const second = new Promise<void>((resolve) => {
    endSecond = resolve;
  });
  let sent = 0;
  const send = async () => {
    sent += 1;
    if (sent === 1) throw new Error("the connection broke");
    await second;
    return { status: 200, body: { readLimited: async () => {} }, discard: () => {} };
  };
  const warming: boolean[] = [];
  const instance = { role: "prefill", url: "http://p", warm: (is: boolean) => warming.push(is) };
  const start = new WarmStart({
    sources: sources as unknown as KvSources,
    upstream: { send } as unknown as Upstream,
    hasChecks: false,
    ...ambient({ clock: manualClock() }),
  });
  const warm = start.warm(instance as unknown as PooledInstance);
  await new Promise((resolve) => setTimeout(resolve, 10));
  expect([sent, warming]).toEqual([2, [true]]);
  endSecond();
  await warm;
  expect(warming).toEqual([true, false]);
});
