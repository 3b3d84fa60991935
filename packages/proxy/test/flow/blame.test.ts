import type { Socket } from "node:net";
import {
  type Answer,
  COMPLETION,
  decodeOk,
  KV_PARAMS_TEXT,
  prefillOk,
  type Seen,
  sendJson,
} from "@kv/testing/http/fake-upstream";
import { describe, expect, test } from "vitest";
import type { ProxyOptions } from "../../src/index.js";
import { isRelease, legsAt } from "../support/releases.js";
import {
  breaks,
  html,
  post,
  type RunningProxy,
  runFleet,
  sends,
  upstreams,
} from "../support/set-up.js";
import { vllmPair } from "../support/vllm-stub.js";

const FAULTS: readonly [what: string, answer: Answer][] = [
  ...[503, 429, 401, 307].map((status): [string, Answer] => [`${status}`, sends(status)]),
  ["HTML", html],
];

/** The statuses that so many clients at once get. */
async function askedTimes(
  { ask }: RunningProxy,
  times: number,
  headers: Readonly<Record<string, string>> = {},
): Promise<number[]> {
  const answers = await Promise.all(Array.from({ length: times }, () => ask({}, { headers })));
  return answers.map(({ status }) => status);
}

/** One or two of three instances are bad. */
const fewGood = (bad: Answer, good: Answer) => [
  [bad, good, good],
  [bad, bad, good],
];

describe.each<ProxyOptions>([
  { mode: "pull" },
  { mode: "push" },
  { mode: "push", pushLegs: "prefill-first" },
  { mode: "auto" },
  { disaggregateAbove: 1_000 },
])("F3: %j", (options) => {
  const cases = ["D", "P"].flatMap((role) => FAULTS.map((fault) => [role, ...fault] as const));
  test.each(cases)(
    "one or two of three %s answer %s: 0 of 60 clients fail",
    async (role, _, bad) => {
      for (const answers of fewGood(bad, role === "P" ? prefillOk : decodeOk)) {
        const [ps, ds] = role === "P" ? [answers, [decodeOk]] : [[prefillOk], answers];
        const running = await runFleet(ps, ds, options);
        expect(new Set(await askedTimes(running, 60))).toEqual(new Set([200]));
        const { prefillers, decoders } = running.proxy.status();
        // Short prompts have no P.
        if (role === "P" && options.disaggregateAbove !== undefined) continue;
        // Those that do their part have no failures, and the others have some.
        const blamed = (role === "P" ? prefillers : decoders).map(({ failures }) => failures > 0);
        expect(blamed).toEqual(answers.map((one) => one === bad));
      }
    },
  );
});

test.each(FAULTS)(
  "F3: one or two of three P that a sidecar's requests name answer %s: 0 of 60 clients fail",
  async (_what, bad) => {
    for (const ps of fewGood(bad, prefillOk)) {
      const named = await upstreams(...ps);
      const running = await runFleet([], [decodeOk], { sidecar: { allow: ["127.0.0.0/8"] } });
      const headers = {
        "x-prefiller-host-port": named.map((one) => new URL(one.url).host).join(","),
      };
      expect(new Set(await askedTimes(running, 60, headers))).toEqual(new Set([200]));
    }
  },
);

test.each([400, 404, 413, 422, 499, 501])(
  "F3: a %i that all answer is no failure of an instance",
  async (status) => {
    const all = [sends(status), sends(status)];
    for (const [ps, ds] of [
      [all, [decodeOk]],
      [[prefillOk], all],
    ] as const) {
      const running = await runFleet(ps, ds);
      const { proxy } = running;
      expect(await askedTimes(running, 3)).toEqual([status, status, status]);
      await expect.poll(() => proxy.status().requests.in_flight).toBe(0);
      for (const { failures } of [...proxy.status().prefillers, ...proxy.status().decoders])
        expect(failures).toBe(0);
    }
  },
);

test("F3: a release that fails is no failure of an instance", async () => {
  const refuses: Answer = (seen) => sends(isRelease(seen) ? 503 : 400)(seen);
  const running = await runFleet([prefillOk], [refuses]);
  expect(await askedTimes(running, 3)).toEqual([400, 400, 400]);
  await running.proxy.close();
  expect(running.proxy.status().decoders[0]).toMatchObject({ failures: 0, in_flight: 0 });
});

/** Closes each connection when its second request comes, as one whose kept connections are dead. */
function deadWhenKept(answer: Answer): Answer {
  const used = new WeakSet<Socket>();
  return (seen) => {
    const { socket } = seen.response;
    if (socket === null || used.has(socket)) return void socket?.destroy();
    used.add(socket);
    return answer(seen);
  };
}

describe.each([
  ["pull", "P"],
  ["pull", "D"],
  ["push", "P"],
  ["push", "D"],
] as const)("F6, field.md R13: %s: dead kept connections of %s", (mode, dead) => {
  test.each([1, 2, 4, 8])("F6: %i", async (count) => {
    const slow =
      (answer: Answer): Answer =>
      (seen) =>
        void setTimeout(() => void answer(seen), 20);
    const ps = dead === "P" ? [deadWhenKept(slow(prefillOk))] : [prefillOk];
    const ds = dead === "D" ? [deadWhenKept(slow(decodeOk))] : [decodeOk];
    const running = await runFleet(ps, ds, { mode });
    // So many connections are kept.
    for (const times of [count, 1, 1, 1, count])
      expect(new Set(await askedTimes(running, times))).toEqual(new Set([200]));
    const { prefillers, decoders } = running.proxy.status();
    for (const { failures } of [...prefillers, ...decoders]) expect(failures).toBe(0);
  });
});

test("F6: what P holds for a D whose kept connection was dead is freed", async () => {
  const vllm = vllmPair();
  const running = await runFleet([vllm.prefill], [deadWhenKept(vllm.decode)]);
  for (let times = 0; times < 4; times += 1) expect(await askedTimes(running, 1)).toEqual([200]);
  await expect.poll(() => vllm.held.size).toBe(0);
  expect(vllm.counts).toEqual({ computedAtDecode: 0, garbage: 0, unknownFrees: 0 });
});

test("F6: another route", async () => {
  const { url } = await runFleet([prefillOk], [deadWhenKept(decodeOk)]);
  for (let times = 0; times < 4; times += 1)
    expect((await post(`${url}/tokenize`, { prompt: "a" })).status).toBe(200);
});

/** Answers as `bad` once, then as `good`. */
function once(bad: Answer, good: Answer): Answer {
  let isFirst = true;
  return (seen: Seen) => {
    if (isRelease(seen)) return sends(400)(seen);
    const answer = isFirst ? bad : good;
    isFirst = false;
    return answer(seen);
  };
}

describe.each(["pull", "push", "auto"] as const)("F7: %s", (mode) => {
  describe.each<[string, Answer]>([
    ["502", sends(502)],
    ["503", sends(503)],
    ["500", sends(500)],
    ["a reset", breaks],
  ])("F7: one %s", (_what, bad) => {
    test("F7: of the only P does not reach the client", async () => {
      const running = await runFleet([once(bad, prefillOk)], [decodeOk], { mode });
      expect(await askedTimes(running, 1)).toEqual([200]);
      // In push, this D does not wait for P.
      expect(running.p[0].seen.length).toBeGreaterThanOrEqual(mode === "push" ? 1 : 2);
    });

    test("F7: of the only D does not reach the client", async () => {
      const running = await runFleet([prefillOk], [once(bad, decodeOk)], { mode });
      expect(await askedTimes(running, 1)).toEqual([200]);
      expect(running.d.map(legsAt)).toEqual([2]);
    });
  });

  test("F7: what the only ones always answer reaches the client, after two tries", async () => {
    const running = await runFleet([sends(503)], [decodeOk], { mode });
    expect(await askedTimes(running, 1)).toEqual([503]);
    expect([running.p[0].seen.length, running.d[0].seen.length > 2]).toEqual([2, false]);
  });
});

test("F7: the wait ends with the request's deadline, and with its client", async () => {
  const timeouts = { requestMs: 100 };
  const running = await runFleet([sends(503)], [decodeOk], { timeouts });
  expect(await askedTimes(running, 1)).toEqual([504]);
  const leaving = new AbortController();
  const asked = running.ask({}, { signal: leaving.signal });
  await running.p[0].request(1);
  leaving.abort();
  await expect(asked).rejects.toThrow();
  await expect.poll(() => running.proxy.status().requests.in_flight).toBe(0);
  expect(running.p[0].seen).toHaveLength(2);
});

test("with n, the client gets the words of D's error", async () => {
  const event = 'data: {"choices":[{"index":0,"text":"a"}]}\n\n';
  const error = { message: "out of memory", type: "InternalServerError", code: 500 };
  const failsLate: Answer = ({ response }) => {
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.write(event);
    setTimeout(() => {
      response.end(`data: ${JSON.stringify({ error })}\n\ndata: [DONE]\n\n`);
    }, 20);
  };
  const { ask, proxy } = await runFleet([prefillOk], [failsLate]);
  const response = await ask({ stream: true, n: 2 });
  let text = "";
  const decoder = new TextDecoder();
  const reading = async () => {
    for await (const chunk of response.body ?? []) text += decoder.decode(chunk);
  };
  await expect(reading()).rejects.toThrow();
  expect(text).toContain(JSON.stringify({ error }));
  await expect.poll(() => proxy.status().requests.failed).toEqual({ KV_PROXY_UPSTREAM_FAILED: 1 });
});

test("60 odd statuses of a D are a few series", async () => {
  let status = 400;
  const { url, metrics, proxy } = await runFleet(
    [prefillOk],
    [({ response }) => sendJson(response, {}, status++)],
  );
  for (let times = 0; times < 60; times += 1)
    await post(`${url}/tokenize`, { prompt: "a" }).catch(() => "a 407 is none for fetch");
  expect((await metrics()).match(/^kv_proxy_requests_total\{/gm)?.length).toBeLessThan(16);
  expect(Object.keys(proxy.status().requests.passed_errors).length).toBeLessThan(16);
});

test("eight copies of a long image are no copies in memory", async () => {
  const message = { role: "assistant", content: "a" };
  const { url, d } = await runFleet(
    [
      ({ response }) =>
        void response.end(`{"choices":[{}],"kv_transfer_params":${KV_PARAMS_TEXT}}`),
    ],
    [sends(200, { ...COMPLETION, choices: [{ index: 0, message }] })],
  );
  const image = { type: "image_url", image_url: { url: `data:,${"a".repeat(11 * 1024 * 1024)}` } };
  const messages = [{ role: "user", content: [image] }];
  const answer = await post(`${url}/v1/chat/completions`, { messages, n: 8 });
  expect(answer.status).toBe(200);
  expect(((await answer.json()) as { choices: unknown[] }).choices).toHaveLength(8);
  expect(d[0].seen).toHaveLength(8);
});
