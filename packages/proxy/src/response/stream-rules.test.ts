import { EventFrames } from "@kv/http";
import { expect, test } from "vitest";
import { FirstEvent, streamedError } from "./answer-filter.js";

const ERROR = '{"error": {"message": "é", "code": 500}}';

/** Reads a stream in two reads. */
function firstOf(text: string, cut: number, limitBytes = 10_000) {
  const first = new FirstEvent(limitBytes);
  const bytes = Buffer.from(text);
  const enough = [bytes.subarray(0, cut), bytes.subarray(cut)].map((chunk) => first.push(chunk));
  first.end();
  return { event: first.event, enough };
}

test.each([
  ['{"choices":[]}', 'data: {"choices":[]}\n\ndata: [DONE]\n\n'],
  ["{}", "event: message_start\r\ndata: {}\r\n\r\n"],
  ['{\n"choices":[]}', 'data: {\ndata: "choices":[]}\n\n'],
  [ERROR, `\ufeff: ping\r\n\r\ndata:${ERROR}\r\n\r\n`],
  [ERROR, `data: ${ERROR}`],
  ['{"type":"error"}', 'data:\n\nevent: error\ndata: {"type":"error"}\n\ndata: {}\n\n'],
  ["[DONE]", ": ping\n\ndata:[DONE]\n\n"],
  [undefined, ": ping\n\n: ping\n\nid: 1\n\n"],
  [undefined, ""],
])("the first event is %j wherever %j is cut", (data, text) => {
  for (let cut = 0; cut <= Buffer.byteLength(text); cut += 1)
    expect([cut, firstOf(text, cut).event?.data]).toEqual([cut, data]);
});

test("the first event is known when it is whole, and unknown above the limit", () => {
  const text = `data: ${ERROR}\n\n`;
  const { length } = Buffer.from(text);
  expect(firstOf(text, length - 1).enough).toEqual([false, true]);
  for (let cut = 0; cut <= length; cut += 1)
    expect(firstOf(text, cut, 20)).toEqual({ event: undefined, enough: [cut >= 20, true] });
});

test.each([
  ["", ERROR, { status: 500, body: ERROR }],
  ["", '{"error": {"code": "KV_LEASE_EXPIRED"}}', { status: 502 }],
  ["", '{"type":"error","error":{"type":"overloaded_error"}}', { status: 503 }],
  ["", '{\ndata: "error"\ndata: :{}}', { status: 502 }],
  ["error", '{"type":"error"}', { status: 502 }],
  ["", '{"id":"1","error":null}', undefined],
  ["", '{"errors":1}', undefined],
  ["", "[DONE]x", undefined],
  ["", '{"error": {"mess', undefined],
])("of the event %j with the data %j, the error is %j", (name, data, expected) => {
  const frames = new EventFrames("utf8");
  const [event] = frames.push(Buffer.from(`event: ${name}\ndata: ${data}\n\n`));
  const error = event && streamedError(event);
  if (expected === undefined) expect(error).toBeUndefined();
  else expect(error).toMatchObject(expected);
});
