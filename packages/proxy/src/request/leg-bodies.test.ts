import { readFileSync } from "node:fs";
import {
  type GenerationRequest,
  parseGenerationRequest,
  parseRequestInSteps,
  type RequestBody,
  withLongMembers,
} from "@kv/fleet/front-end";
import { rawMember } from "@kv/http";
import { systemClock, YieldingQueue } from "@kv/interface";
import { expect, test } from "vitest";
import {
  decodeBody,
  KV_REQUEST_PULL,
  prefillBody,
  singleInstanceBody,
  splitRequest,
} from "./leg-bodies.js";

const recorded = JSON.parse(
  readFileSync(new URL("../../fixtures/vllm-0.33-pull.json", import.meta.url), "utf8"),
) as Record<
  "prefill_request" | "prefill_response" | "decode_request",
  Record<string, unknown> & { kv_transfer_params: object }
>;

/** The text of a body that is sent. */
const textOf = (body: RequestBody) =>
  typeof body === "string" ? body : Buffer.concat(body).toString();
const request = (text: string) => parseGenerationRequest("/v1/completions", Buffer.from(text));
/** The parts of a request, in one turn. */
function allParts(given: GenerationRequest) {
  const split = splitRequest(given, 4);
  let step = split.next();
  while (step.done !== true) step = split.next();
  return step.value;
}
const prefill = (fields: object) =>
  JSON.parse(textOf(prefillBody(request(JSON.stringify(fields)), KV_REQUEST_PULL, "id"))) as object;

test("both bodies equal those that a real vLLM 0.33 accepted", () => {
  const { kv_transfer_params: _, ...client } = recorded.decode_request;
  const given = request(JSON.stringify(client));
  // What concerns the answer alone is left out.
  const {
    logprobs: _logprobs,
    return_token_ids: _ids,
    ...prefillRequest
  } = recorded.prefill_request;
  expect(JSON.parse(textOf(prefillBody(given, KV_REQUEST_PULL, "id")))).toEqual({
    ...prefillRequest,
    stream: false,
  });
  const answered = rawMember(JSON.stringify(recorded.prefill_response), "kv_transfer_params") ?? "";
  expect(JSON.parse(textOf(decodeBody(given, answered, "id")))).toEqual(recorded.decode_request);
});

test("the prefill body requests one token, one copy and no stream, and lowers only the limits that are set", () => {
  const given = {
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: 9,
    min_tokens: 4,
    n: 1,
    x: [1],
  };
  expect(prefill(given)).toMatchObject({
    stream: false,
    max_tokens: 1,
    min_tokens: 1,
    n: 1,
    x: [1],
  });
  expect(prefill(given)).not.toHaveProperty("stream_options");
  expect(prefill({ max_completion_tokens: 9 })).toMatchObject({
    max_tokens: 1,
    max_completion_tokens: 1,
  });
  const bare = prefill({ prompt: "a", min_tokens: 0 });
  expect(Object.keys(bare).sort()).toEqual([
    "kv_transfer_params",
    "max_tokens",
    "min_tokens",
    "prompt",
    "stream",
  ]);
  expect(bare).toMatchObject({ min_tokens: 0 });
});

test("integers beyond 2^53, of the client and of the prefill worker, reach both legs", () => {
  const given = request('{"seed":9007199254740993,"unknown_field":18446744073709551615}');
  expect(prefillBody(given, KV_REQUEST_PULL, "id")).toContain(
    '"seed":9007199254740993,"unknown_field":18446744073709551615',
  );
  expect(decodeBody(given, '{"generation":9007199254740995}', "id")).toBe(
    '{"seed":9007199254740993,"unknown_field":18446744073709551615,"kv_transfer_params":{"generation":9007199254740995}}',
  );
});

test("the body for a single instance has no KV parameters", () => {
  expect(singleInstanceBody(request('{"prompt":"a","kv_transfer_params":null}'))).toBe(
    '{"prompt":"a"}',
  );
});

test("both legs of a response have one id, which vLLM takes from the body there; a client's own id stays", () => {
  const ids = (body: string) => {
    const given = parseGenerationRequest("/v1/responses", Buffer.from(body));
    const legs = [prefillBody(given, KV_REQUEST_PULL, "id"), decodeBody(given, "{}", "id")];
    return legs.map((leg) => (JSON.parse(textOf(leg)) as { request_id?: unknown }).request_id);
  };
  expect(ids('{"input":"a"}')).toEqual(["resp_id", "resp_id"]);
  expect(ids('{"input":"a","request_id":null}')).toEqual(["resp_id", "resp_id"]);
  expect(ids('{"input":"a","request_id":"own"}')).toEqual(["own", "own"]);
});

test("the legs of a long body are those of a short one, and its long members are not copied", async () => {
  const member = `"documents":["${"x".repeat(300_000)}"]`;
  const text = `{"stream_options":${JSON.stringify({ a: "y".repeat(9000) })},"n":1,${member},"max_tokens":7}`;
  const sync = { ...request('{"n":1,"max_tokens":7}') };
  const long = await parseRequestInSteps(
    "/v1/completions",
    Buffer.from(text.replace("{", '{"stream":true,')),
    new YieldingQueue({ clock: systemClock() }),
  );
  for (const leg of [
    (given: typeof sync) => prefillBody(given, KV_REQUEST_PULL, "id"),
    (given: typeof sync) => decodeBody(given, '{"a":1}', "id"),
    singleInstanceBody,
  ]) {
    const body = leg(long);
    const { documents, stream_options: _, stream: __, ...rest } = JSON.parse(textOf(body));
    const { stream: ___, ...expected } = JSON.parse(textOf(leg(sync)));
    expect(rest).toEqual(expected);
    expect(documents[0]).toHaveLength(300_000);
    const bytes = long.long.find(({ key }) => key === "documents")?.value;
    expect((body as Uint8Array[]).includes(bytes as Uint8Array)).toBe(true);
  }
  expect(JSON.parse(textOf(prefillBody(long, KV_REQUEST_PULL, "id")))).not.toHaveProperty(
    "stream_options",
  );
});

test("parts of a long body have their own prompt, and the other long members", async () => {
  const prompts = ["a".repeat(200_000), "b".repeat(200_000)];
  const text = JSON.stringify({ model: "m", prompt: prompts, stop: ["x".repeat(5000)] });
  const given = await parseRequestInSteps(
    "/v1/completions",
    Buffer.from(text),
    new YieldingQueue({ clock: systemClock() }),
  );
  const parts = allParts(given);
  const whole = ({ text, long }: GenerationRequest) => withLongMembers(text, long);
  for (const body of [whole, singleInstanceBody])
    expect(parts.map((part) => JSON.parse(textOf(body(part.request))))).toEqual(
      prompts.map((prompt) => ({ model: "m", prompt, stop: ["x".repeat(5000)] })),
    );
  const seed = Buffer.from(JSON.stringify({ prompt: prompts, n: 2, seed: "5".repeat(5000) }));
  const seeded = await parseRequestInSteps(
    "/v1/completions",
    seed,
    new YieldingQueue({ clock: systemClock() }),
  );
  expect(() => allParts(seeded)).toThrow("must be an integer");
});

test("a long list of prompts is split in pieces, as it was written", async () => {
  const strings = ['\\"],[{\\\\', "\\ud83d\\ude00😀", "", "x".repeat(90_000), '\\"'.repeat(20_000)];
  for (const written of [
    strings.map((text) => `"${text}"`),
    [`[${"123,".repeat(20_000)}9007199254740993]`, "[1]", "[]", "[ 2 , 3 ]"],
  ]) {
    const body = Buffer.from(
      `{"stop":["${"x".repeat(300_000)}"],"prompt": [${written.join(" , ")} ]}`,
    );
    const given = await parseRequestInSteps(
      "/v1/completions",
      body,
      new YieldingQueue({ clock: systemClock() }),
    );
    const split = splitRequest(given, 8, 1000);
    let pieces = 0;
    let step = split.next();
    for (; step.done !== true; step = split.next()) pieces += 1;
    expect(pieces).toBeGreaterThanOrEqual(Math.floor(written.join(" , ").length / 1100));
    const sent = step.value.map(({ request }) => request.long.at(-1));
    expect(
      sent.map((member) =>
        Buffer.from(member?.value ?? [])
          .toString()
          .trim(),
      ),
    ).toEqual(written);
    // The prompts are views of the client's body.
    for (const member of sent) expect(member?.value.buffer).toBe(body.buffer);
    expect(step.value.map(({ request }) => request.fields.prompt)).toEqual(given.fields.prompt);
  }
});
