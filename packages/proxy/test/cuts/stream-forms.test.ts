import { sendStream } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { runPair } from "../support/set-up.js";
import { byChoice, decodeAnswer } from "./answers.js";

/** What the client gets of three streams of D that have this form. */
async function streamed(form: (text: string) => string = (text) => text): Promise<string> {
  const { ask } = await runPair({
    d: ({ json, response }) =>
      sendStream(response, form(decodeAnswer("/v1/completions", json).text)),
  });
  const answer = await ask({ n: 3, stream: true }, { headers: { "x-request-id": "r" } });
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
  expect(await streamed(form)).toBe(await streamed());
});
