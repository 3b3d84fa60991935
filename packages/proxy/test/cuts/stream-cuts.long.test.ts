// A long suite: cuts streams at bytes all over; stream-forms.test.ts has their forms.
import { BodyQueue } from "@kv/fleet/front-end";
import { afterEach, describe, expect, test, vi } from "vitest";
import { runProxy } from "../support/set-up.js";
import { HIDDEN_HOST } from "./answers.js";
import { byChoice } from "./by-choice.js";
import { type InstanceUrls, replaceInstances, Script, startInstances } from "./cut-instances.js";
import { ALL, cutAt, everyByte, randomCuts, UNCUT } from "./cuts.js";
import { KeptClient } from "./kept-client.js";
import { type AskedBody, bodiesOf, WAYS, type Way } from "./ways.js";

/** In the short form, the streams of these ways are cut at every byte, except the longest. */
const AT_EVERY_BYTE = new Set(["pull", "sidecar without its header"]);

function isCutAtEveryByte({ name }: Way, { body: { stream, prompt, n } }: AskedBody): boolean {
  const isLong = Array.isArray(prompt) && n !== undefined;
  return ALL || (AT_EVERY_BYTE.has(name) && stream === true && !isLong);
}

const clients: KeptClient[] = [];
afterEach(() => {
  vi.restoreAllMocks();
  for (const client of clients.splice(0)) client.close();
});

/** A router in front of two instances, and a client of it. */
async function start(way: Way, [p, d]: InstanceUrls) {
  const { url } = await runProxy(way.options(p, d));
  const client = new KeptClient(url);
  clients.push(client);
  const named = way.named === true ? { "x-prefiller-host-port": new URL(p).host } : {};
  return async ({ endpoint, body }: AskedBody) => {
    const received = await client.post(endpoint, body, { "x-request-id": "r", ...named });
    const { "content-type": type } = received.headers;
    return { status: received.status, type, body: byChoice(received.body) };
  };
}

/** D's hosts reach no client, and what P knows is P's. */
function expectPerLeg(body: string, { name }: Way, { body: { stream } }: AskedBody): void {
  // Its KV parameters are D's to read, so a D that reports them is told P's number.
  const isPush = name === "push at once";
  const hasKv = /^pull|^push|with its header/.test(name);
  expect([name, body]).toEqual([name, expect.not.stringContaining(HIDDEN_HOST)]);
  if (isPush) expect(body).toMatch(/"(cached_tokens|cache_read_input_tokens)":(2|4|0)[,}]/);
  if (isPush) expect(body).not.toMatch(/"(cached_tokens|cache_read_input_tokens)":(99|198|297)/);
  if (stream !== true) expect(body).not.toMatch(hasKv ? /AAAA/ : /"routed_experts":null/);
}

/** Asks with the answers whole, then with each of these cuts of the longest one. */
async function expectSame(
  script: Script,
  ask: (asked: AskedBody) => Promise<{ status: number; body: string }>,
  asked: AskedBody,
  way: Way,
  cutsFor: (lengthBytes: number) => Iterable<readonly number[]>,
): Promise<void> {
  script.cut = UNCUT;
  script.lengthBytes = 0;
  const whole = await ask(asked);
  expect([asked, whole]).toMatchObject([
    asked,
    { status: 200, body: expect.not.stringContaining("KV_") },
  ]);
  expectPerLeg(whole.body, way, asked);
  for (const cuts of cutsFor(script.lengthBytes)) {
    script.cut = cutAt(cuts);
    expect({ asked, cuts, ...(await ask(asked)) }).toEqual({ asked, cuts, ...whole });
  }
}

describe.each(WAYS)("$name", { timeout: 3_600_000 }, (way) => {
  test("an answer is the same wherever the reads of it end", async () => {
    const script = new Script();
    const ask = await start(way, replaceInstances(script));
    for (const asked of bodiesOf(way)) {
      const what = `${way.name} ${JSON.stringify(asked)}`;
      if (isCutAtEveryByte(way, asked)) await expectSame(script, ask, asked, way, everyByte);
      await expectSame(script, ask, asked, way, randomCuts(ALL ? 200 : 5, 2, what));
    }
  });

  test("so it is with instances that are servers", async () => {
    const script = new Script();
    const ask = await start(way, await startInstances(script));
    for (const asked of bodiesOf(way)) {
      const what = `${way.name} at servers ${JSON.stringify(asked)}`;
      await expectSame(script, ask, asked, way, ALL ? everyByte : randomCuts(2, 2, what));
    }
  });
});

test("the reads of the servers' answers end at the cuts", async () => {
  const script = new Script();
  const [pull] = WAYS;
  if (pull === undefined) throw new Error("no way");
  const ask = await start(pull, await startInstances(script));
  const { next } = BodyQueue.prototype;
  const lengths: number[] = [];
  vi.spyOn(BodyQueue.prototype, "next").mockImplementation(async function (this: BodyQueue) {
    const result = await next.call(this);
    lengths.push(result.value?.length ?? 0);
    return result;
  });
  script.cut = cutAt([7, 8, 100]);
  await ask({ endpoint: "/v1/completions", body: { prompt: "a", stream: true } });
  // The prefill leg's answer, then the stream.
  expect([lengths.slice(0, 3), lengths.slice(-5, -2)]).toEqual([
    [7, 1, 92],
    [7, 1, 92],
  ]);
});
