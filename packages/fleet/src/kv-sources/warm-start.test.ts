import { ambient } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import type { PooledInstance } from "../instances/pooled-instance.js";
import type { Deadline } from "../request/deadline.js";
import type { Upstream } from "../upstream/upstream.js";
import type { KvSources } from "./kv-sources.js";
import { WarmStart } from "./warm-start.js";

const prompt = { model: "m", tokens: Int32Array.of(1, 2), uses: 1 };
const source = { peer: "10.0.0.9:5710", instance: undefined, tokens: 2 };

/** A start with two prompts, and what the instance was told of its state. */
function startWith(send: (request: { readonly abort: Deadline }) => Promise<unknown>) {
  const sources = {
    asked: { mostAsked: () => [prompt, prompt] },
    holders: async () => [source],
    kvTransferParam: () => "{}",
  };
  const warming: boolean[] = [];
  const instance = { role: "prefill", url: "http://p", warm: (is: boolean) => warming.push(is) };
  const clock = manualClock();
  const start = new WarmStart({
    sources: sources as unknown as KvSources,
    upstream: { send } as unknown as Upstream,
    hasChecks: false,
    ...ambient({ clock }),
  });
  const warm = start.warm(instance as unknown as PooledInstance);
  return { start, warm, warming, clock };
}

test("an instance takes load only when all its fetches have ended, also where one fails", async () => {
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
  const { warm, warming } = startWith(send);
  await new Promise((resolve) => setTimeout(resolve, 10));
  expect([sent, warming]).toEqual([2, [true]]);
  endSecond();
  await warm;
  expect(warming).toEqual([true, false]);
});

test.each([
  ["a source that says nothing holds it up for ten seconds", "later"],
  ["a front end that ends does not wait for it", "closed"],
])("%s", async (_, how) => {
  const { start, warm, warming, clock } = startWith(
    ({ abort }) => new Promise((__, reject) => abort.onAbort(() => reject(abort.reason))),
  );
  await new Promise((resolve) => setTimeout(resolve, 10));
  clock.advance(9_999);
  await new Promise((resolve) => setTimeout(resolve, 10));
  expect(warming).toEqual([true]);
  if (how === "closed") start.close();
  else clock.advance(1);
  await warm;
  expect([warming, clock.pending()]).toEqual([[true, false], 0]);
});
