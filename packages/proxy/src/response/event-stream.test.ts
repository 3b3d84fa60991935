import { expect, test } from "vitest";
import { beginsWithDone, firstEventError, firstEventIsKnown, StreamWatch } from "./event-stream.js";

test("finds the error in the first event, and its status", () => {
  const bytes = Buffer.from('data: {"error": {"message": "no KV", "code": 500}}\n\ndata: [DONE]\n\n');
  expect(firstEventError(bytes)).toEqual({
    status: 500,
    body: '{"error": {"message": "no KV", "code": 500}}',
  });
  const odd = Buffer.from('data: {"error": {"message": "x", "code": "KV_LEASE_EXPIRED"}}\n\n');
  expect(firstEventError(odd)?.status).toBe(502);
  expect(firstEventError(Buffer.from('data: {"id":"1","error":null}\n\n'))).toBeUndefined();
  expect(firstEventError(Buffer.from('data: {"error": {"mess\n\n'))).toBeUndefined();
});

test("finds the end of the error event after comments and with CRLF", () => {
  const bytes = Buffer.from(': ping\r\n\r\ndata: {"error": {"code": 503}}\r\n\r\ndata: [DONE]\r\n\r\n');
  expect(firstEventError(bytes)).toEqual({ status: 503, body: '{"error": {"code": 503}}' });
  expect(beginsWithDone(Buffer.from(": ping\n\ndata:[DONE]\n\n"))).toBe(true);
  expect(beginsWithDone(Buffer.from("data: {}\n\ndata: [DONE]\n\n"))).toBe(false);
});

test.each([
  [['data: {"choices":[{"text":"a"}]}\n\n'], [true, false]],
  [
    ['data: {"cho', 'ices": [', ' {"text":"a"}]}\n\n'],
    [true, false],
  ],
  [
    ['data: {"choices":[]}\n\n', 'data: {"choices":[null]}\n\n'],
    [false, false],
  ],
  [['data: {"x":"\\"choices\\":[{"}\n\n'], [false, false]],
  [
    ['data: {"choices":[{}]}\n\ndata: {"er', 'ror": {"message":"m"}}\n\n'],
    [true, true],
  ],
  [
    ['data: {"error": null}\n\n', 'data: {"text":"\\ndata: {\\"error\\": 1"}\n\n'],
    [false, false],
  ],
])("in %j a choice and a failure are found: %j", (chunks, said) => {
  const watch = new StreamWatch("/v1/completions");
  for (const chunk of chunks) watch.push(Buffer.from(chunk));
  expect([watch.answered, watch.failed]).toEqual(said);
});

test("the first event is known at once, except an incomplete error event", () => {
  expect(firstEventIsKnown(Buffer.from('data: {"id"'))).toBe(true);
  for (const more of [": ping\n\n", ": pi", "\r\n", "da", "data: ", 'data: {"err', "data: [DON"])
    expect(firstEventIsKnown(Buffer.from(more))).toBe(false);
  expect(firstEventIsKnown(Buffer.from(": ping\n\ndata: {}\n\n"))).toBe(true);
  expect(firstEventIsKnown(Buffer.from("data: [DONE]"))).toBe(true);
  expect(firstEventIsKnown(Buffer.from('data: {"error": {}}\r\n\r\n'))).toBe(true);
  expect(firstEventIsKnown(Buffer.from('data: {"error": {"mess'))).toBe(false);
  expect(firstEventIsKnown(Buffer.from('data: {"error": {}}\n\n'))).toBe(true);
});

test.each([
  [["data: {}\n\n", "data: [DONE]\n\n"], true],
  [["data: {}\n\ndata: [DO", "NE]\n", "\n"], true],
  [["data:[DONE]\r\n\r\n"], true],
  [["data: {}\n\n"], false],
  [["data: [DONE]\n\n", "data: {}\n\n"], false],
  [['data: {"text":"data: [DONE]"}\n\n'], false],
  [[], false],
])("%j is a complete stream: %s", (chunks, complete) => {
  const watch = new StreamWatch("/v1/completions");
  for (const chunk of chunks) watch.push(Buffer.from(chunk));
  expect(watch.complete).toBe(complete);
});

test.each([
  [["event: response.created\ndata: {}\n\n", "event: response.completed\ndata: {}\n\n"], true],
  [["event: response.com", "pleted\ndata: ", `${"x".repeat(500)}\n`, "\n"], true],
  [["event: response.incomplete\ndata: {"], false],
  [['event: response.output_text.delta\ndata: {"x":"event: response.completed"}\n\n'], false],
])("%j is a complete stream of the Responses API: %s", (chunks, complete) => {
  const watch = new StreamWatch("/v1/responses");
  for (const chunk of chunks) watch.push(Buffer.from(chunk));
  expect(watch.complete).toBe(complete);
});
