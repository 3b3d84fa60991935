// A long suite: cuts streams at bytes all over; stream-forms.test.ts has their forms.
import { Agent } from "node:http";
import { BodyQueue } from "@kv/fleet/front-end";
import { afterEach, describe, expect, test, vi } from "vitest";
import { send } from "../support/plain-client.js";
import { runProxy } from "../support/set-up.js";
import { byChoice, HIDDEN_HOST } from "./answers.js";
import { CutInstances } from "./cut-instances.js";
import { ALL, cutAt, everyByte, randomCuts, UNCUT } from "./cuts.js";
import { type AskedBody, bodiesOf, WAYS, type Way } from "./ways.js";

/** In the short form, the streams of these ways are cut at every byte, except the longest. */
const AT_EVERY_BYTE = new Set(["pull", "sidecar without its header"]);

function isCutAtEveryByte({ name }: Way, { body: { stream, prompt, n } }: AskedBody): boolean {
  const isLong = Array.isArray(prompt) && n !== undefined;
  return ALL || (AT_EVERY_BYTE.has(name) && stream === true && !isLong);
}

const agent = new Agent({ keepAlive: true, maxSockets: 1 });
afterEach(() => {
  vi.restoreAllMocks();
  agent.destroy();
});

/** A router in front of two instances, and a client of it. */
async function start(way: Way) {
  const instances = new CutInstances();
  const [p, d] = await instances.start();
  const { url } = await runProxy(way.options(p.url, d.url));
  const named = way.named === true ? { "x-prefiller-host-port": new URL(p.url).host } : {};
  const ask = async ({ endpoint, body }: AskedBody) => {
    const headers = { "x-request-id": "r", ...named };
    const received = await send(`${url}${endpoint}`, body, headers, agent);
    return { ...received, body: byChoice(received.body) };
  };
  return { instances, ask };
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
  { instances, ask }: Awaited<ReturnType<typeof start>>,
  asked: AskedBody,
  way: Way,
  cutsFor: (lengthBytes: number) => Iterable<readonly number[]>,
): Promise<void> {
  instances.cut = UNCUT;
  instances.lengthBytes = 0;
  const whole = await ask(asked);
  expect([asked, whole]).toMatchObject([
    asked,
    { status: 200, body: expect.not.stringContaining("KV_") },
  ]);
  expectPerLeg(whole.body, way, asked);
  for (const cuts of cutsFor(instances.lengthBytes)) {
    instances.cut = cutAt(cuts);
    expect({ asked, cuts, ...(await ask(asked)) }).toEqual({ asked, cuts, ...whole });
  }
}

describe.each(WAYS)("$name", { timeout: 3_600_000 }, (way) => {
  test("an answer is the same wherever the reads of it end", async () => {
    const started = await start(way);
    for (const asked of bodiesOf(way)) {
      const what = `${way.name} ${JSON.stringify(asked)}`;
      if (isCutAtEveryByte(way, asked)) await expectSame(started, asked, way, everyByte);
      await expectSame(started, asked, way, randomCuts(ALL ? 200 : 7, 2, what));
    }
  });
});

test("the reads of the servers' answers end at the cuts", async () => {
  const [pull] = WAYS;
  if (pull === undefined) throw new Error("no way");
  const { instances, ask } = await start(pull);
  const { next } = BodyQueue.prototype;
  const lengths: number[] = [];
  vi.spyOn(BodyQueue.prototype, "next").mockImplementation(async function (this: BodyQueue) {
    const result = await next.call(this);
    lengths.push(result.value?.length ?? 0);
    return result;
  });
  instances.cut = cutAt([7, 8, 100]);
  await ask({ endpoint: "/v1/completions", body: { prompt: "a", stream: true } });
  // The prefill leg's answer, then the stream.
  expect([lengths.slice(0, 3), lengths.slice(-5, -2)]).toEqual([
    [7, 1, 92],
    [7, 1, 92],
  ]);
});
