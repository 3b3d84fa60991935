import type { Endpoint } from "@kv/fleet/front-end";
import { afterEach, describe, expect, test, vi } from "vitest";
import { runProxy } from "../support/set-up.js";
import { decodeAnswer, HIDDEN_PARAMS } from "./answers.js";
import { byChoice } from "./by-choice.js";
import { replaceInstances, Script } from "./cut-instances.js";
import { KeptClient } from "./kept-client.js";

const clients: KeptClient[] = [];
afterEach(() => {
  vi.restoreAllMocks();
  for (const client of clients.splice(0)) client.close();
});

const SIDECAR = "sidecar without its header";

/** A router whose decode instance's streams have another form, and a client of it. */
async function start(how: "pull" | typeof SIDECAR, form: (text: string) => string, status = 200) {
  const script = new Script();
  script.decode = (endpoint, body) => {
    const { contentType, text } = decodeAnswer(endpoint, body);
    return { status, contentType, text: form(text) };
  };
  const [p, d] = replaceInstances(script);
  const { url } = await runProxy(
    how === "pull"
      ? { prefillers: [p], decoders: [d] }
      : { decoders: [d], sidecar: { allow: ["p.example"] } },
  );
  const client = new KeptClient(url);
  clients.push(client);
  const ask = async (endpoint: Endpoint, body: object) => {
    const asked = { ...body, stream: true };
    const received = await client.post(endpoint, asked, { "x-request-id": "r" });
    return { status: received.status, text: byChoice(received.body) };
  };
  return { ask };
}

const lines = (end: string) => (text: string) => text.replaceAll("\n", end);
const multiLine = (text: string) =>
  text
    .replaceAll('"choices":[{', '"choices":\ndata: [\ndata: {')
    .replaceAll("}]}\n", "}\ndata: ]}\n");

/**
 * A stream as its client gets it: D's KV parameters are hidden, and all other bytes are as they
 * were.
 */
const shown = (text: string) => text.replaceAll(HIDDEN_PARAMS, "null");

const FORMS: readonly (readonly [what: string, form: (text: string) => string])[] = [
  ["CRLF at the ends of lines", lines("\r\n")],
  ["CR at the ends of lines", lines("\r")],
  ["a byte order mark", (text) => `\ufeff${text}`],
  ["comments", (text) => `: one\n\n${text.replaceAll("\ndata", "\n: more\ndata")}: é`],
  ["data of several lines", multiLine],
  ["data of several lines that end with CRLF", (text) => lines("\r\n")(multiLine(text))],
  ["no blank after the colon", (text) => text.replaceAll("data: ", "data:")],
  [
    "other fields and events without data",
    (text) => `id: 1\nretry: 2\n\ndata\n\n${text.replaceAll("data: {", "id: 3\ndata: {")}`,
  ],
  ["no blank line after [DONE]", (text) => text.slice(0, -1)],
  ["no line end after [DONE]", (text) => text.slice(0, -2)],
];
const choices = { prompt: "a", n: 3 };

describe.each(FORMS)("a stream with %s", (_what, form) => {
  test("passes as it is", async () => {
    const asked = [
      ["pull", { prompt: "a" }],
      [SIDECAR, choices],
    ] as const;
    for (const [how, body] of asked) {
      const { ask } = await start(how, form);
      const { text } = decodeAnswer("/v1/completions", { ...body, stream: true });
      const expected = { status: 200, text: byChoice(shown(form(text))) };
      expect(await ask("/v1/completions", body)).toEqual(expected);
      vi.restoreAllMocks();
    }
  });

  test("is merged as one in vLLM's form", async () => {
    const plain = await start("pull", (text) => text);
    const expected = await plain.ask("/v1/completions", choices);
    vi.restoreAllMocks();
    const { ask } = await start("pull", form);
    expect(await ask("/v1/completions", choices)).toEqual(expected);
  });
});

const OTHER_FORMS: typeof FORMS = [
  ...FORMS.slice(0, 4),
  ["[DONE] after its last event", (text) => `${text}data: [DONE]\n\n`],
  ["[DONE] without a blank line", (text) => `${text}data: [DONE]`],
];

test.each(OTHER_FORMS)("a stream of another API with %s passes as it is", async (_what, form) => {
  for (const endpoint of ["/v1/responses", "/v1/messages"] as const) {
    const { ask } = await start("pull", form);
    const { text } = decodeAnswer(endpoint, { stream: true });
    const expected = { status: 200, text: shown(form(text)) };
    expect(await ask(endpoint, { input: "a", messages: [], max_tokens: 3 })).toEqual(expected);
    vi.restoreAllMocks();
  }
});

const ERROR = '{"error":{"message":"é","code":503}}';

test.each(["\n", "\r\n", "\r"])(
  "an error in the first event is the answer, with %j at the ends of lines",
  async (end) => {
    const stream = lines(end)(`: ping\n\ndata: ${ERROR}\n\ndata: [DONE]\n\n`);
    const { ask } = await start("pull", () => stream);
    for (const body of [{ prompt: "a" }, choices])
      expect(await ask("/v1/completions", body)).toEqual({ status: 503, text: ERROR });
    expect(await ask("/v1/messages", { messages: [], max_tokens: 3 })).toEqual({
      status: 503,
      text: ERROR,
    });
  },
);

test("an error in the middle passes as it is", async () => {
  const form = (text: string) => text.replace("data: [DONE]", `data: ${ERROR}\n\ndata: [DONE]`);
  const { ask } = await start("pull", form);
  const { text } = decodeAnswer("/v1/completions", { stream: true });
  expect(await ask("/v1/completions", { prompt: "a" })).toEqual({
    status: 200,
    text: byChoice(shown(form(text))),
  });
});

test("field.md R13: KV parameters of several lines are hidden, and the lines stay", async () => {
  const form = (text: string) =>
    text.replaceAll(
      HIDDEN_PARAMS,
      '\r\ndata: {"remote_host":\r\n: one\r\ndata:"10.9.8.7"\r\ndata: }',
    );
  const { ask } = await start("pull", form);
  const { text } = decodeAnswer("/v1/completions", { stream: true });
  const expected = text.replaceAll(HIDDEN_PARAMS, "\r\ndata: \r\n: one\r\ndata:\r\ndata: null");
  expect(await ask("/v1/completions", { prompt: "a" })).toEqual({
    status: 200,
    text: byChoice(expected),
  });
});

test("a server failure that is a stream is one, without addresses", async () => {
  const stream = 'data: {"error":{"message":"READ from 10.1.2.3:5600 failed"}}\n\ndata: [DONE]\n\n';
  for (const how of ["pull", SIDECAR] as const) {
    const { ask } = await start(how, () => stream, 500);
    const { status, text } = await ask("/v1/completions", { prompt: "a" });
    expect([status, text]).toEqual([500, expect.not.stringContaining("10.1.2.3")]);
    vi.restoreAllMocks();
  }
});
