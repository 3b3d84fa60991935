import {
  type Answer,
  COMPLETION,
  KV_PARAMS_TEXT,
  type Seen,
  sendJson,
} from "@kv/testing/http/fake-upstream";
import { describe, expect, it } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import { isRelease, releasesAt } from "../support/releases.js";
import { post, runFleet, upstream } from "../support/set-up.js";

type Fields = Readonly<Record<string, unknown>>;

/** The id by which vLLM's engines match both legs: each route makes it in its own way. */
const idOf = ({ path, headers, json }: Seen) =>
  json.request_id === undefined
    ? `${path.includes("chat") ? "chatcmpl" : "cmpl"}-${String(headers["x-request-id"])}`
    : String(json.request_id);

const answerOf = ({ path }: Seen): Fields =>
  path.includes("responses") ? { id: "r", output: [], status: "completed" } : { ...COMPLETION };

/**
 * A pair of push. A P of vLLM 0.33 frees its blocks when a D has registered its own under the same
 * id, and learns of no refusal. One of this project frees them when a D refuses their parameters. D
 * answers clients' requests with `refuse` where it returns true.
 */
function pushPair({ isKv, refuse }: { isKv: boolean; refuse: (seen: Seen) => boolean }) {
  const held = new Set<string>();
  const counts = { registeredForNothing: 0 };
  let prefillReady: Promise<void> = Promise.resolve();
  const prefill: Answer = async (seen) => {
    await prefillReady;
    if (seen.response.destroyed) return;
    held.add(idOf(seen));
    const kv_transfer_params = {
      ...JSON.parse(KV_PARAMS_TEXT),
      transfer_mode: "push",
      remote_request_id: idOf(seen),
      ...(isKv ? { kv_peer: { incarnation: "i", generation: 1 } } : {}),
    };
    sendJson(seen.response, { ...answerOf(seen), kv_transfer_params });
  };
  const decode: Answer = (seen) => {
    const params = seen.json.kv_transfer_params as Fields;
    if (isRelease(seen)) {
      if (isKv && params.kv_peer !== undefined) held.delete(String(params.remote_request_id));
      return sendJson(seen.response, { error: { message: "beam search" } }, 400);
    }
    if (refuse(seen)) return;
    if (!held.delete(idOf(seen))) counts.registeredForNothing += 1;
    sendJson(seen.response, answerOf(seen));
  };
  return {
    held,
    counts,
    prefill,
    decode,
    /** P answers when the returned function is called. */
    holdPrefill() {
      let go = () => {};
      prefillReady = new Promise((resolve) => {
        go = resolve;
      });
      return () => go();
    },
  };
}

/** As a D of vLLM whose `max_model_len` a request exceeds. */
const refuseLong = ({ json, response }: Seen): boolean => {
  if (Number(json.max_tokens ?? json.max_output_tokens) < 1000) return false;
  sendJson(response, { error: { message: "max_tokens is too large", code: 400 } }, 400);
  return true;
};

const push = { mode: "push" } as const;
const start = (pair: ReturnType<typeof pushPair>, options: ProxyOptions = {}) =>
  runFleet([pair.prefill], [pair.decode], { ...push, ...options });

describe.each([
  ["vLLM's P", false],
  ["a P of this project", true],
])("F1: a push D refuses a request, and its blocks are freed: %s", (_, isKv) => {
  it.each(["at-once", "prefill-first"] as const)(
    "F1: 120 requests with 400, %s",
    async (pushLegs) => {
      const pair = pushPair({ isKv, refuse: refuseLong });
      const { ask, p } = await start(pair, { pushLegs });
      const answers = await Promise.all(
        Array.from({ length: 120 }, () => ask({ max_tokens: 1e6 })),
      );
      expect(new Set(answers.map(({ status }) => status))).toEqual(new Set([400]));
      expect(p[0].seen.length).toBe(120);
      await expect.poll(() => pair.held.size).toBe(0);
      // The release of what P no longer holds would take blocks of D for ever.
      expect(pair.counts.registeredForNothing).toBe(0);
    },
  );

  it.each([
    ["/v1/chat/completions", { messages: [] }],
    ["/v1/responses", { input: "a" }],
  ])("F1: %s", async (path, body) => {
    const pair = pushPair({ isKv, refuse: refuseLong });
    const { url } = await start(pair);
    const limit = path === "/v1/responses" ? "max_output_tokens" : "max_tokens";
    expect((await post(`${url}${path}`, { ...body, [limit]: 1e6 })).status).toBe(400);
    await expect.poll(() => pair.held.size).toBe(0);
  });

  it("F1: P is under way when D refuses", async () => {
    const pair = pushPair({ isKv, refuse: refuseLong });
    const { ask, d } = await start(pair);
    const go = pair.holdPrefill();
    const asked = ask({ max_tokens: 1e6 });
    await d[0].request(0);
    go();
    expect((await asked).status).toBe(400);
    await expect.poll(() => pair.held.size).toBe(0);
  });

  it("F1: a request that is served has no release", async () => {
    const pair = pushPair({ isKv, refuse: refuseLong });
    const { ask, d, proxy } = await start(pair, { pushLegs: "prefill-first" });
    expect((await ask({ max_tokens: 5 })).status).toBe(200);
    await proxy.close();
    expect([d[0].seen.length, pair.held.size]).toEqual([1, 0]);
  });

  it.each([307, 404, 429, 501])("F1: D answers %i", async (status) => {
    const refuse = ({ json, response }: Seen) => {
      if (json.max_tokens === 1) return false;
      sendJson(response, {}, status);
      return true;
    };
    const pair = pushPair({ isKv, refuse });
    const { ask } = await start(pair);
    await ask({ max_tokens: 5 });
    await expect.poll(() => pair.held.size).toBe(0);
    expect(pair.counts.registeredForNothing).toBe(0);
  });
});

describe("F1: a push D fails, and its engine may have taken the KV", () => {
  it.each([500, 502, 503, 504, 200])(
    "F1: D answers %i: one harmless release for each prefill",
    async (status) => {
      const refuse = ({ response }: Seen) => {
        response.writeHead(status, { "content-type": "text/html" });
        response.end("<html></html>");
        return true;
      };
      const pair = pushPair({ isKv: true, refuse });
      const { ask, p, d } = await start(pair);
      for (let times = 0; times < 10; times += 1) await ask({ max_tokens: 5 });
      await expect.poll(() => pair.held.size).toBe(0);
      await expect.poll(() => releasesAt(d[0])).toBe(p[0].seen.length);
    },
  );
});

it("F1: P has answered with another engine than D was given: its blocks are freed", async () => {
  const refuse = ({ json, response }: Seen) => {
    if ((json.kv_transfer_params as Fields).remote_engine_id === "e") return false;
    sendJson(response, { error: { message: "wrong engine" } }, 500);
    return true;
  };
  const pair = pushPair({ isKv: false, refuse });
  const p = await upstream(pair.prefill);
  const prefillers = [{ url: p.url, kv: { engineId: "before" } }];
  const { ask } = await start(pair, { prefillers });
  expect((await ask()).status).toBe(200);
  await expect.poll(() => pair.held.size).toBe(0);
});
