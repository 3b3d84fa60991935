import { CLIENT_HEADERS } from "@kv/fleet/front-end";
import { type Answer, COMPLETION, KV_PARAMS_TEXT } from "@kv/testing/http/fake-upstream";
import { describe, expect, test } from "vitest";
import { ANSWER_MEMBERS } from "../../src/response/answer-members.js";
import { runFleet, runPair, sends } from "../support/set-up.js";
import { VLLM_APIS } from "../support/vllm-apis.js";

describe("field.md R6, R10, R11: one table for each leg", () => {
  test.each(VLLM_APIS)("each header that vLLM %s reads has a row", (_release, { headers }) => {
    expect(headers.length).toBeGreaterThan(5);
    expect(headers.filter((name) => CLIENT_HEADERS[name] === undefined)).toEqual([]);
  });

  test.each(VLLM_APIS)("each member of an answer of vLLM %s has a row", (_release, { answers }) => {
    expect(Object.keys(answers)).toHaveLength(4);
    for (const [route, members] of Object.entries(answers))
      expect(
        members.filter((path) => ANSWER_MEMBERS.get(path) === undefined),
        route,
      ).toEqual([]);
  });

  test("each row is one of some vLLM", () => {
    const members = new Set(VLLM_APIS.flatMap(([, { answers }]) => Object.values(answers).flat()));
    expect([...ANSWER_MEMBERS.keys()].filter((path) => !members.has(path))).toEqual([]);
  });
});

test("field.md R6: D's data-parallel rank and the format of its metrics do not reach P; the session and the priority reach both", async () => {
  const { p, d, ask } = await runPair();
  const both = { "x-session-id": "s", "x-vllm-priority": "2", tracestate: "a=b" };
  const ofD = { "x-data-parallel-rank": "3", "endpoint-load-metrics-format": "json" };
  await ask({}, { headers: { ...both, ...ofD } });
  expect(d.seen[0]?.headers).toMatchObject({ ...both, ...ofD });
  expect(p.seen[0]?.headers).toMatchObject(both);
  for (const name of Object.keys(ofD)) expect(p.seen[0]?.headers).not.toHaveProperty(name);
  const forwarding = await runPair({}, { forwardHeaders: ["X-data-parallel-rank"] });
  await forwarding.ask({}, { headers: ofD });
  expect(forwarding.p.seen[0]?.headers).toMatchObject({ "x-data-parallel-rank": "3" });
});

const EXPERTS = { ...COMPLETION, choices: [{ ...COMPLETION.choices[0], routed_experts: "AAAA" }] };

test("field.md R11: experts that D cannot know are left out, and a header names them; those of D alone stay", async () => {
  const { ask } = await runPair({ d: sends(200, EXPERTS) });
  for (const body of [{ prompt: "a" }, { prompt: "a", n: 2 }]) {
    const answer = await ask(body);
    expect(answer.headers.get("x-kv-left-out")).toBe("routed_experts");
    expect(JSON.stringify(await answer.json())).toMatch(/^((?!AAAA).)*"routed_experts":null/);
  }
  const alone = await runPair({ d: sends(200, EXPERTS) }, { disaggregateAbove: 1_000_000 });
  const answer = await alone.ask();
  expect([answer.headers.get("x-kv-left-out"), await answer.json()]).toEqual([null, EXPERTS]);
});

test("field.md R13: an answer that is too long to be held has no KV parameters of D either", async () => {
  const text = "a".repeat(300_000);
  const long = {
    choices: [{ index: 0, text, routed_experts: text }],
    kv_transfer_params: { remote_host: "h" },
  };
  const { ask } = await runPair(
    { d: sends(200, long) },
    { limits: { heldAnswerLengthBytes: 1000 } },
  );
  const answer = await ask();
  expect(await answer.json()).toEqual({
    choices: [{ index: 0, text, routed_experts: null }],
    kv_transfer_params: null,
  });
});

describe("field.md R10: in push, the cached tokens are P's", () => {
  const usage = { prompt_tokens: 10, prompt_tokens_details: { cached_tokens: 10 } };
  const params = { ...JSON.parse(KV_PARAMS_TEXT), transfer_mode: "push" };
  /** P answers later than D. */
  const start = (prefillAnswer: object, decodeAnswer: object = COMPLETION) => {
    const late = sends(200, { choices: [{ text: "a" }], ...prefillAnswer });
    return runFleet(
      [(seen) => void setTimeout(() => void late(seen), 50)],
      [sends(200, { ...decodeAnswer, usage })],
      { mode: "push", limits: { heldAnswerLengthBytes: 100_000 } },
    );
  };

  test.each([
    [
      "as D is told them in pull",
      { kv_transfer_params: { ...params, remote_prefill_cached_tokens: 4 } },
      4,
    ],
    [
      "of its usage",
      { kv_transfer_params: params, usage: { prompt_tokens_details: { cached_tokens: 0 } } },
      0,
    ],
    ["none where it says nothing", { kv_transfer_params: params, usage: null }, null],
  ])("%s", async (_name, prefillAnswer, cached) => {
    const { ask } = await start(prefillAnswer);
    expect(await (await ask()).json()).toEqual({
      ...COMPLETION,
      usage: { prompt_tokens: 10, prompt_tokens_details: { cached_tokens: cached } },
    });
  });

  test("also in an answer that is too long to be held, of which all other bytes stay", async () => {
    const long = { choices: [{ index: 0, text: "1.0é".repeat(100_000) }] };
    const { ask } = await start(
      { kv_transfer_params: { ...params, remote_prefill_cached_tokens: 4 } },
      long,
    );
    const answer = await (await ask()).text();
    const expected = { ...long, usage: { ...usage, prompt_tokens_details: { cached_tokens: 4 } } };
    expect(answer === JSON.stringify(expected)).toBe(true);
  });
});

describe("field.md R13: P's limit of one token", () => {
  /** As vLLM 0.31 refuses a prompt that is too long. */
  const tooLong: Answer = (seen) =>
    sends(400, {
      error: { message: `However, you requested ${seen.json["max_tokens"]} output tokens` },
    })(seen);

  test.each(["pull", "push"] as const)(
    "%s: its refusal is not what the client reads",
    async (mode) => {
      const { ask, d } = await runFleet([tooLong], [tooLong], { mode });
      const refused = async (limit: number) => {
        const answer = await ask({ max_tokens: limit });
        return [answer.status, await answer.text()];
      };
      expect(await refused(8)).toEqual([400, expect.stringContaining("requested 8 output")]);
      const before = d[0].seen.length;
      // The client's own limit is P's: nothing is unclear.
      expect(await refused(1)).toEqual([400, expect.stringContaining("requested 1 output")]);
      if (mode === "pull") expect(d[0].seen.length).toBe(before);
    },
  );
});
