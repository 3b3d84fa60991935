import type { Endpoint } from "@kv/fleet/front-end";
import fc from "fast-check";
import { expect, test } from "vitest";
import { AnswerFilter, type AnswerTraits } from "./answer-filter.js";

const TRAITS: AnswerTraits = {
  status: 200,
  eventStream: true,
  onePart: true,
  kvFromPrefill: true,
  cachedTokens: async () => 7,
};
/** An unstreamed answer. */
const JSON_ANSWER = { eventStream: false };

/** What leaves of a text whose reads end at these bytes, and what is said of it. */
async function outcomeOf(
  endpoint: Endpoint,
  text: string,
  cuts: readonly number[],
  traits: Partial<AnswerTraits> = {},
) {
  const filter = new AnswerFilter(endpoint, { ...TRAITS, ...traits });
  const bytes = Buffer.from(text);
  const ends = [...cuts].sort((a, b) => a - b);
  const passed: Buffer[] = [];
  for (const [at, end] of [...ends, bytes.length].entries()) {
    passed.push(await filter.push(bytes.subarray(ends[at - 1] ?? 0, end)));
    if (filter.problem !== undefined) break;
  }
  if (filter.problem === undefined) passed.push(await filter.end());
  const { problem, failed, leftOut } = filter;
  return { passed: Buffer.concat(passed).toString(), problem, failed, leftOut };
}

/** As the whole text has it; the same for a cut at each byte, and for single bytes. */
async function outcomeOfEachCut(endpoint: Endpoint, text: string, traits?: Partial<AnswerTraits>) {
  const whole = await outcomeOf(endpoint, text, [], traits);
  const cuts = Array.from({ length: Buffer.byteLength(text) }, (_, at) => at);
  for (const at of cuts)
    expect([at, await outcomeOf(endpoint, text, [at], traits)]).toEqual([at, whole]);
  expect(await outcomeOf(endpoint, text, cuts, traits)).toEqual(whole);
  return whole;
}

const CHOICE = 'data: {"id":"é","choices":[{"index":0,"text":"a"}]}\n\n';
const DONE = "data: [DONE]\n\n";
const MORE = "sent more after the last event of its stream";
const NO_END = "ended its stream without its last event";
const NO_CHOICE = "ended its stream without a choice";
const INDEX = "streamed a choice with another index than 0";
const FINE = { problem: undefined, failed: false, leftOut: [] };

test.each([
  CHOICE + DONE,
  `${CHOICE}data:[DONE]`,
  `\ufeff: ping\n\n${CHOICE}: ping\n${CHOICE}${DONE}\n: bye\n\n: bye`,
  `data: {"choices": [\ndata: { "index" :0}]}\n\n${CHOICE}${DONE}`,
  `${CHOICE}data: {"text":"data: [DONE]","choices":[{"index":0}]}\n\n${DONE}`,
  `${CHOICE}data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":1}]}}]}\n\n${DONE}`,
  `${CHOICE}data: {"text":"\\"choices\\":[{\\"index\\":1"}\n\n${DONE}`,
  `data: {"choices":[{"text":"a"}]}\n\nevent: message_stop\ndata: {}\n\n${DONE}`,
  `id: 1\nretry: 2\n\ndata\n\nid: 3\n${CHOICE}${DONE.slice(0, -1)}`,
  `${CHOICE}event: "usage":{}\n: "kv_transfer_params":[\ndata: no JSON\n\n${DONE}`,
])("%j passes whole, with each line end, wherever it is cut", async (text) => {
  for (const end of ["\n", "\r\n", "\r"]) {
    const passed = text.replaceAll("\n", end);
    expect(await outcomeOfEachCut("/v1/completions", passed)).toEqual({ ...FINE, passed });
  }
});

test.each([
  [`${CHOICE}data: {"error":{"message":"m"}}\n\n${DONE}`, true],
  [`data: { "error" : {}}\n\n${DONE}`, true],
  [`${CHOICE}data: {\ndata: "error":1}\n\n${DONE}`, true],
  [`${CHOICE}data: {"id":1,"error":"m"}\n\n${DONE}`, true],
  [`${CHOICE}data: {}\nevent: error\n\n${DONE}`, true],
  [`${CHOICE}data: {"error":null}\n\n${DONE}`, false],
  [`${CHOICE}data: {"text":"{\\"error\\":1}"}\n\n${DONE}`, false],
])("in %j a failure is reported: %s", async (passed, failed) => {
  const outcome = await outcomeOfEachCut("/v1/chat/completions", passed);
  expect(outcome).toEqual({ ...FINE, passed, failed });
});

test.each([
  [CHOICE, "", NO_END],
  [CHOICE, 'data: {"choices":[{"text', NO_END],
  [CHOICE, DONE.slice(0, 9), NO_END],
  [CHOICE + DONE, CHOICE, MORE],
  [CHOICE + DONE, DONE, MORE],
  ['data: {"choices":[]}\n\n', DONE, NO_CHOICE],
  ['data: {"choices":[null]}\n\n', DONE, NO_CHOICE],
  [CHOICE, 'data: {"choices":[{"index":1}]}\n\n', INDEX],
  [CHOICE, 'data: {"choices":[{"index"\ndata: : 1}]}\n\n', INDEX],
])("%j passes, and then %j: %s", async (passed, rest, problem) => {
  const outcome = await outcomeOfEachCut("/v1/completions", passed + rest);
  expect(outcome).toEqual({ ...FINE, passed, problem });
});

test("several prompts or copies have choices of any index", async () => {
  const passed = `${CHOICE.replace('"index":0', '"index":12')}${DONE}`;
  const outcome = await outcomeOfEachCut("/v1/completions", passed, { onePart: false });
  expect(outcome).toEqual({ ...FINE, passed });
});

const LAST = { "/v1/responses": "response.completed", "/v1/messages": "message_stop" } as const;

test.each(["/v1/responses", "/v1/messages"] as const)(
  "a stream of %s ends with its last event",
  async (endpoint) => {
    const delta = 'event: delta\ndata: {"text":"event: response.completed message_stop"}\n\n';
    const last = `event: ${LAST[endpoint]}\ndata: {"text":"${"x".repeat(200)}"}\n\n`;
    for (const after of ["", "\n", ": bye\n\n", DONE, "data: [DONE]"]) {
      const passed = delta + last + after;
      expect(await outcomeOfEachCut(endpoint, passed)).toEqual({ ...FINE, passed });
    }
    for (const [passed, rest, problem] of [
      [delta + last, delta, MORE],
      [delta + DONE, "", NO_END],
      // An event without its blank line is none.
      [delta, last.slice(0, -1), NO_END],
    ] as const)
      expect(await outcomeOfEachCut(endpoint, passed + rest)).toEqual({ ...FINE, passed, problem });
  },
);

const KV = '"kv_transfer_params":';

test.each([
  ["in objects and lists", `{"a":[{${KV}[1,{"b":"]"}],"c":"é"}]}`, `{"a":[{${KV}null,"c":"é"}]}`],
  [
    "blanks",
    '{ "kv_transfer_params" :\n {"a": 1} ,"b":2}',
    '{ "kv_transfer_params" :\n null ,"b":2}',
  ],
  [
    "numbers and null",
    `{${KV}-1.5e3 ,"ec_transfer_params":null}`,
    `{${KV}null ,"ec_transfer_params":null}`,
  ],
  ["a string with quotes", String.raw`{${KV}"a\\\"b","c":1}`, `{${KV}null,"c":1}`],
  [
    "names in values",
    String.raw`["usage",{"a":"kv_transfer_params","b":"\"usage\":{\"_tokens_details\""}]`,
    undefined,
  ],
  [
    "a usage",
    '{"usage":{"a":"é","prompt_tokens_details":{"cached_tokens":1}}}',
    '{"usage":{"a":"é","prompt_tokens_details":{"cached_tokens":7}}}',
  ],
  ["a usage without cached tokens", '{"usage":{"a": 1.0}}', undefined],
  ["a usage that breaks off", '{"a":1,"usage":{"_tokens_details":', undefined],
])("JSON, wherever it is cut: %s", async (_what, text, passed = text) => {
  const outcome = await outcomeOfEachCut("/v1/completions", text, JSON_ANSWER);
  expect(outcome).toEqual({ ...FINE, passed });
});

test("what neither instance has whole is left out of JSON, and named, where P computed the prompt", async () => {
  const text = '{"choices":[{"routed_experts":"AAAA"}],"routed_experts":null}';
  const left = await outcomeOfEachCut("/v1/completions", text, JSON_ANSWER);
  expect(left).toEqual({
    ...FINE,
    passed: text.replace('"AAAA"', "null"),
    leftOut: ["routed_experts"],
  });
  const alone = { ...JSON_ANSWER, kvFromPrefill: false };
  expect(await outcomeOfEachCut("/v1/completions", text, alone)).toEqual({ ...FINE, passed: text });
});

test("a usage that is too long to be held is a problem", async () => {
  const text = `{"usage":{"_tokens_details":"${"x".repeat(70_000)}"}}`;
  const { problem } = await outcomeOf("/v1/completions", text, [69_000], JSON_ANSWER);
  expect(problem).toBe("sent a usage of more than 65536 bytes");
});

test.each([
  ["a byte order mark", `\ufeffdata: {${KV}"a"}\n\n`, `\ufeffdata: {${KV}null}\n\n`],
  [
    "KV parameters of several lines",
    `data: {"kv_transfer_params"\ndata: : {\nid: }\ndata: "a": 1\n: }\ndata:}, "b": 1}\n\n`,
    `data: {"kv_transfer_params"\ndata: : \nid: }\ndata: \n: }\ndata:null, "b": 1}\n\n`,
  ],
  [
    "a usage",
    'data: {"usage":{"input_tokens_details":{}},"x":1.0}\n\n',
    'data: {"usage":{"input_tokens_details":{"cached_tokens":7}},"x":1.0}\n\n',
  ],
  [
    "a value that its event cuts off",
    'data: {"usage":{"a":1\n\ndata: {"b":"}"}\n\n',
    'data: {"usage":{"a":1\n\ndata: {"b":"}"}\n\n',
  ],
])("streams, wherever they are cut: %s", async (_what, text, passed) => {
  for (const end of ["\n", "\r\n", "\r"]) {
    const [given, expected] = [text, passed].map((all) =>
      (all + CHOICE + DONE).replaceAll("\n", end),
    );
    const outcome = await outcomeOfEachCut("/v1/completions", given ?? "");
    expect(outcome).toEqual({ ...FINE, passed: expected });
  }
});

test("any JSON, cut anywhere, is the same but for the members", async () => {
  const name = fc.constantFrom("kv_transfer_params", "a", 'b"', "ec_transfer_params\\");
  const { value } = fc.letrec<{ value: unknown }>((tie) => ({
    value: fc.oneof(
      { maxDepth: 4 },
      fc.oneof(fc.string({ unit: "binary" }), fc.integer(), fc.constant(null), fc.boolean(), name),
      fc.array(tie("value"), { maxLength: 3 }),
      fc.dictionary(name, tie("value"), { maxKeys: 4 }),
    ),
  }));
  await fc.assert(
    fc.asyncProperty(
      value,
      fc.array(fc.nat(10_000), { maxLength: 4 }),
      fc.nat(3),
      async (json, positions, indent) => {
        const text = `[${JSON.stringify(json, null, indent)}]`;
        const hidden = (key: string, one: unknown) => (key === "kv_transfer_params" ? null : one);
        const expected = `[${JSON.stringify(JSON.parse(text)[0], hidden, indent)}]`;
        const cuts = positions.map((at) => at % Buffer.byteLength(text));
        const { passed } = await outcomeOf("/v1/completions", text, cuts, JSON_ANSWER);
        expect(passed).toBe(expected);
      },
    ),
    { numRuns: 300 },
  );
});

const WORDS = [
  "data: ",
  "data:",
  "event: ",
  "id: 1",
  ": c",
  "[DONE]",
  "error",
  "message_stop",
  "response.failed",
  '"choices":[{"index":',
  '"error":',
  KV,
  '"usage":{"_tokens_details":1}',
  ":",
  "[",
  "{",
  "}]}",
  "0",
  "1",
  " ",
  '"',
  "\ufeff",
  "é",
  CHOICE.slice(5),
  "\n",
  "\n\n",
  "\n\n",
  "\r",
  "\r\n",
  "\r\n\r\n",
  CHOICE,
  DONE,
  "data: [DONE]\n",
  'data: {"error":',
];

test("what passes of any text, and what is said of it, does not depend on the cuts", async () => {
  await fc.assert(
    fc.asyncProperty(
      fc.constantFrom<Endpoint>("/v1/completions", "/v1/responses", "/v1/messages"),
      fc.boolean(),
      fc.array(fc.constantFrom(...WORDS), { maxLength: 24 }),
      fc.array(fc.nat(400), { maxLength: 6 }),
      async (endpoint, onePart, words, positions) => {
        const text = words.join("");
        const length = Buffer.byteLength(text);
        const whole = await outcomeOf(endpoint, text, [], { onePart });
        const single = Array.from({ length }, (_, at) => at);
        for (const cuts of [positions.map((at) => at % (length + 1)), single])
          expect(await outcomeOf(endpoint, text, cuts, { onePart })).toEqual(whole);
      },
    ),
    { numRuns: 2000 },
  );
});
