import { ENDPOINTS, type Endpoint } from "@kv/fleet/front-end";
import { type Answer, sendStream } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { post, runPair } from "../support/set-up.js";
import { byChoice, decodeAnswer, HIDDEN_PARAMS, prefillAnswer } from "./answers.js";

/** What the client gets of a stream of D that has another form. */
async function streamed(
  endpoint: Endpoint,
  body: object,
  form: (text: string) => string = (text) => text,
): Promise<string> {
  const p: Answer = ({ response }) => void response.end(prefillAnswer(endpoint).text);
  const d: Answer = ({ json, response }) =>
    sendStream(response, form(decodeAnswer(endpoint, json).text));
  const { url } = await runPair({ p, d });
  const answer = await post(
    url + endpoint,
    { ...body, stream: true },
    { headers: { "x-request-id": "r" } },
  );
  expect(answer.status).toBe(200);
  return byChoice(await answer.text());
}

const lines = (end: string) => (text: string) => text.replaceAll("\n", end);
const multiLine = (text: string) =>
  text
    .replaceAll('"choices":[{', '"choices":\ndata: [\ndata: {')
    .replaceAll("}]}\n", "}\ndata: ]}\n");

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

test.each(FORMS)("a stream with %s is merged as one in vLLM's form", async (_what, form) => {
  const body = { prompt: "a", n: 3 };
  const plain = await streamed("/v1/completions", body);
  expect(await streamed("/v1/completions", body, form)).toBe(plain);
});

/** D's KV parameters are hidden, and all other bytes stay. */
test.each(ENDPOINTS)(
  "a stream of %s passes as it is, with [DONE] after its last event",
  async (endpoint) => {
    const done = (text: string) => (text.includes("[DONE]") ? text : `${text}data: [DONE]\n\n`);
    const { text } = decodeAnswer(endpoint, { stream: true });
    const shown = done(text).replaceAll(HIDDEN_PARAMS, "null");
    const body = endpoint === "/v1/completions" ? { prompt: "a" } : { input: "a", messages: [] };
    expect(await streamed(endpoint, { ...body, max_tokens: 3 }, done)).toBe(byChoice(shown));
  },
);
