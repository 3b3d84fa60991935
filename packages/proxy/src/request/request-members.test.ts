import { type Endpoint, parseGenerationRequest, type RequestBody } from "@kv/fleet/front-end";
import { vllmRequests } from "@kv/protocol";
import { describe, expect, test } from "vitest";
import { KV_REQUEST_PULL, memberUse, prefillBody, REQUEST_MEMBERS } from "./leg-bodies.js";

const ROUTES: readonly Endpoint[] = [
  "/v1/completions",
  "/v1/chat/completions",
  "/v1/responses",
  "/v1/messages",
];
const textOf = (body: RequestBody) =>
  typeof body === "string" ? body : Buffer.concat(body).toString();
/** P's leg of a request, without what the proxy adds. */
function prefill(endpoint: Endpoint, fields: object): Record<string, unknown> {
  const request = parseGenerationRequest(endpoint, Buffer.from(JSON.stringify(fields)));
  const { kv_transfer_params: _, ...rest } = JSON.parse(
    textOf(prefillBody(request, KV_REQUEST_PULL, "id")),
  );
  return rest;
}

describe.each(ROUTES)("%s", (route) => {
  test("each member of vLLM's request class has a use", () => {
    expect([...vllmRequests().keys()]).toEqual(["0.31.0", "0.32.0", "0.33.0"]);
    for (const [release, requests] of vllmRequests()) {
      const members = requests[`request ${route}`] ?? [];
      expect(members.length, release).toBeGreaterThan(15);
      expect(
        members.filter((name) => memberUse(route, name) === undefined),
        release,
      ).toEqual([]);
    }
  });

  test("what P's leg does not get is for the answer alone, and a member that no vLLM has reaches P", () => {
    const members = new Set(
      [...vllmRequests().values()].flatMap((each) => each[`request ${route}`] ?? []),
    );
    const kept = [...members].filter((name) =>
      ["prompt", "sampling"].includes(memberUse(route, name) ?? ""),
    );
    const value = (name: string) =>
      /^(previous_|prompt$|use_beam)/.test(name) ? null : `of ${name}`;
    const body = Object.fromEntries(kept.map((name) => [name, value(name)]));
    const id = { request_id: "own" };
    expect(prefill(route, { ...body, ...id, of_a_later_vllm: 1 })).toMatchObject({
      ...body,
      ...id,
      of_a_later_vllm: 1,
    });
    const dropped = [...members].filter((name) => memberUse(route, name) === "answer");
    const flags = { background: false, stream_options: {}, echo: false };
    const given = { ...Object.fromEntries(dropped.map((name) => [name, 1])), ...flags };
    expect(Object.keys(prefill(route, given)).filter((name) => dropped.includes(name))).toEqual([]);
  });
});

test("each member in the list is one of some vLLM", () => {
  const requests = [...vllmRequests().values()];
  const all = new Set(
    requests.flatMap((each) => ROUTES.flatMap((route) => each[`request ${route}`] ?? [])),
  );
  expect([...REQUEST_MEMBERS.keys()].filter((name) => !all.has(name))).toEqual([]);
});

test("P's leg asks for no log probabilities: they are D's, or the request has one leg", () => {
  const logprobs = {
    echo: true,
    logprobs: 2,
    logprob_token_ids: [1],
    return_token_ids: true,
    skip_special_tokens: false,
  };
  expect(Object.keys(prefill("/v1/completions", { prompt: "a", ...logprobs })).sort()).toEqual([
    "max_tokens",
    "prompt",
    "stream",
  ]);
});

test("the tools stay in P's leg of a chat, whose template renders them, with the choice and the format that a renderer may write into the prompt", () => {
  const prompt = {
    messages: [],
    tools: [{ type: "function", function: { name: "f" } }],
    tool_choice: { type: "function", function: { name: "f" } },
    response_format: { type: "json_object" },
  };
  const answer = {
    structured_outputs: { choice: ["a"] },
    parallel_tool_calls: false,
    stop: ["a"],
    user: "u",
  };
  expect(prefill("/v1/chat/completions", { ...prompt, ...answer })).toEqual({
    ...prompt,
    max_tokens: 1,
    stream: false,
  });
  // No renderer writes it into a completion's prompt.
  expect(
    prefill("/v1/completions", { prompt: "a", response_format: { type: "json_object" } }),
  ).toEqual({
    prompt: "a",
    max_tokens: 1,
    stream: false,
  });
});

test("a response is not stored by P, and its text format is D's", () => {
  const body = {
    input: "a",
    store: true,
    text: { format: { type: "json_object" } },
    metadata: { a: "b" },
  };
  expect(
    prefill("/v1/responses", {
      ...body,
      include: ["message.output_text.logprobs"],
      top_logprobs: 2,
    }),
  ).toEqual({
    input: "a",
    store: false,
    max_output_tokens: 1,
    stream: false,
    request_id: "resp_id",
  });
});

test("a named tool of the Messages API keeps its choice in P's leg, and one token of its arguments is no answer that vLLM refuses", () => {
  const body = { messages: [], tools: [{ name: "f", input_schema: {} }], max_tokens: 50 };
  const named = { ...body, tool_choice: { type: "tool", name: "f" } };
  const leg = { ...body, max_tokens: 1, stream: false };
  expect(prefill("/v1/messages", { ...named, stop_sequences: ["x"] })).toEqual({
    ...leg,
    tool_choice: named.tool_choice,
    stop_sequences: ["{"],
  });
  for (const tool_choice of [{ type: "any" }, { type: "auto" }, { type: "none" }])
    expect(prefill("/v1/messages", { ...body, tool_choice, stop_sequences: ["x"] })).toEqual({
      ...leg,
      tool_choice,
    });
});
