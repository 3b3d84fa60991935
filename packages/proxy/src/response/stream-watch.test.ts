import type { Endpoint } from "@kv/fleet/front-end";
import fc from "fast-check";
import { expect, test } from "vitest";
import { StreamWatch } from "./stream-watch.js";

function outcomeOf(endpoint: Endpoint, chunks: readonly Uint8Array[], onePart = true) {
  const watch = new StreamWatch(endpoint, onePart);
  const passed = Buffer.concat([...chunks.map((chunk) => watch.push(chunk)), watch.end()]).toString(
    "latin1",
  );
  return { passed, problem: watch.problem, failed: watch.failed };
}

/** The bytes cut at these positions. */
function cutAt(bytes: Buffer, positions: readonly number[]): Buffer[] {
  const ends = [...positions].sort((a, b) => a - b);
  return [...ends, bytes.length].map((end, i) => bytes.subarray(ends[i - 1] ?? 0, end));
}

/**
 * As the whole text has it; checked to be the same for a cut at each byte, and for single bytes.
 */
function outcomeOfEachCut(endpoint: Endpoint, text: string, onePart?: boolean) {
  const bytes = Buffer.from(text);
  const whole = outcomeOf(endpoint, [bytes], onePart);
  for (let at = 0; at <= bytes.length; at += 1)
    expect(outcomeOf(endpoint, cutAt(bytes, [at]), onePart)).toEqual(whole);
  expect(
    outcomeOf(
      endpoint,
      Array.from(bytes, (byte) => Buffer.from([byte])),
      onePart,
    ),
  ).toEqual(whole);
  return { ...whole, passed: Buffer.from(whole.passed, "latin1").toString() };
}

const CHOICE = 'data: {"id":"é","choices":[{"index":0,"text":"a"}]}\n\n';
const DONE = "data: [DONE]\n\n";
const MORE = "sent more after the last event of its stream";
const NO_END = "ended its stream without its last event";

test.each([
  CHOICE + DONE,
  `${CHOICE}data:[DONE]`,
  `\ufeff: ping\n\n${CHOICE}: ping\n${CHOICE}${DONE}\n: bye\n\n: bye`,
  `data: {"choices": [\ndata: { "index" :0}]}\n\n${CHOICE}${DONE}`,
  `${CHOICE}data: {"text":"data: [DONE]","choices":[{"index":0}]}\n\n${DONE}`,
  `${CHOICE}data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":1}]}}]}\n\n${DONE}`,
  `${CHOICE}data: {"text":"\\"choices\\":[{\\"index\\":1"}\n\n${DONE}`,
  `data: {"choices":[{"text":"a"}]}\n\nevent: message_stop\ndata: {}\n\n${DONE}`,
])("%j passes whole, with each line end, wherever it is cut", (text) => {
  for (const end of ["\n", "\r\n", "\r"]) {
    const given = text.replaceAll("\n", end);
    expect(outcomeOfEachCut("/v1/completions", given)).toEqual({
      passed: given,
      problem: undefined,
      failed: false,
    });
  }
});

test.each([
  [`${CHOICE}data: {"error":{"message":"m"}}\n\n${DONE}`, true],
  [`data: { "error" : {}}\n\n${DONE}`, true],
  [`${CHOICE}data: {\ndata: "error":1}\n\n${DONE}`, true],
  [`${CHOICE}data: {"error":null}\n\n${DONE}`, false],
  [`${CHOICE}data: {"text":"{\\"error\\":1}"}\n\n${DONE}`, false],
])("in %j a failure is reported: %s", (text, failed) => {
  expect(outcomeOfEachCut("/v1/chat/completions", text)).toEqual({
    passed: text,
    problem: undefined,
    failed,
  });
});

test.each([
  ["", CHOICE, NO_END],
  ["", CHOICE + DONE.slice(0, 9), NO_END, CHOICE],
  [CHOICE + DONE, CHOICE, MORE, CHOICE + DONE],
  [CHOICE + DONE, DONE, MORE, CHOICE + DONE],
  [
    "",
    `data: {"choices":[]}\n\n${DONE}`,
    "ended its stream without a choice",
    'data: {"choices":[]}\n\n',
  ],
  [
    "",
    `data: {"choices":[null]}\n\n${DONE}`,
    "ended its stream without a choice",
    'data: {"choices":[null]}\n\n',
  ],
  [
    CHOICE,
    'data: {"choices":[{"index":1}]}\n\n',
    "streamed a choice with another index than 0",
    `${CHOICE}data: {"choices":[{"index":`,
  ],
])("%j and then %j: %s", (before, text, problem, passed = before + text) => {
  expect(outcomeOfEachCut("/v1/completions", before + text)).toEqual({
    passed,
    problem,
    failed: false,
  });
});

test("several prompts or copies have choices of any index", () => {
  const text = `${CHOICE.replace('"index":0', '"index":12')}${DONE}`;
  expect(outcomeOfEachCut("/v1/completions", text, false).problem).toBeUndefined();
});

const LAST = { "/v1/responses": "response.completed", "/v1/messages": "message_stop" } as const;

test.each(["/v1/responses", "/v1/messages"] as const)(
  "a stream of %s ends with its last event",
  (endpoint) => {
    const delta = 'event: delta\ndata: {"text":"event: response.completed message_stop"}\n\n';
    const last = `event: ${LAST[endpoint]}\ndata: {"text":"${"x".repeat(200)}"}\n\n`;
    for (const after of ["", "\n", ": bye\n\n", DONE, "data: [DONE]"]) {
      const text = delta + last + after;
      expect(outcomeOfEachCut(endpoint, text)).toEqual({
        passed: text,
        problem: undefined,
        failed: false,
      });
    }
    expect(outcomeOfEachCut(endpoint, delta + last + delta)).toMatchObject({
      passed: delta + last,
      problem: MORE,
    });
    expect(outcomeOfEachCut(endpoint, delta + DONE)).toMatchObject({
      passed: delta + DONE,
      problem: NO_END,
    });
    // An event without its blank line is none.
    expect(outcomeOfEachCut(endpoint, delta + last.slice(0, -1)).problem).toBe(NO_END);
  },
);

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
  '"choices"',
  '"index"',
  '"error"',
  ":",
  "[",
  "{",
  "}]}",
  "0",
  "1",
  " ",
  "\t",
  '"',
  "x",
  "\ufeff",
  "é",
  CHOICE.slice(5),
  "x: ",
  '"choices":[{',
  '"choices":[{"index":',
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
  '"index":1',
];

test("what passes of any text, and what is said of it, does not depend on the cuts", () => {
  fc.assert(
    fc.property(
      fc.constantFrom<Endpoint>("/v1/completions", "/v1/responses", "/v1/messages"),
      fc.boolean(),
      fc.array(fc.constantFrom(...WORDS), { maxLength: 24 }),
      fc.array(fc.nat(400), { maxLength: 6 }),
      (endpoint, onePart, words, positions) => {
        const bytes = Buffer.from(words.join(""));
        const cuts = positions.map((at) => at % (bytes.length + 1));
        const whole = outcomeOf(endpoint, [bytes], onePart);
        expect(outcomeOf(endpoint, cutAt(bytes, cuts), onePart)).toEqual(whole);
        const single = Array.from(bytes, (byte) => Buffer.from([byte]));
        expect(outcomeOf(endpoint, single, onePart)).toEqual(whole);
        expect(bytes.toString("latin1").startsWith(whole.passed)).toBe(true);
      },
    ),
    { numRuns: 3000 },
  );
});
