import { expect, test } from "vitest";
import { EventReader, FirstEvent, streamedError } from "./event-stream.js";

function eventsOf(chunks: readonly Uint8Array[], limitBytes = 1000) {
  const reader = new EventReader(limitBytes);
  const events: string[] = [];
  const take = (found: Iterable<{ name: string; data: string }>) => {
    for (const { name, data } of found) events.push(name === "" ? data : `${name}: ${data}`);
  };
  for (const chunk of chunks) take(reader.push(chunk));
  take(reader.end());
  return events;
}

/** The text whole, cut at each byte, and as single bytes. */
function cutsOf(text: string): Uint8Array[][] {
  const bytes = Buffer.from(text);
  const cuts = Array.from({ length: bytes.length + 1 }, (_, at) => [
    bytes.subarray(0, at),
    bytes.subarray(at),
  ]);
  return [[bytes], ...cuts, Array.from(bytes, (byte) => Buffer.from([byte]))];
}

const LINES = [
  ": a comment",
  "",
  "event: one",
  "id: 1",
  "data: é🎈",
  "data:b",
  "",
  "data",
  "",
  "event: empty",
  "",
  "data: {",
  ": within",
  "data:  1}",
  "event: late",
  "",
  "data: last",
];

test.each(["\n", "\r\n", "\r"])("reads the same events wherever a stream with %j is cut", (end) => {
  for (const mark of ["", "\ufeff"])
    for (const chunks of cutsOf(mark + LINES.join(end)))
      expect(eventsOf(chunks)).toEqual(["one: é🎈\nb", "{\n 1}", "last"]);
});

test("line ends may be mixed, and only a mark at the begin of the stream is dropped", () => {
  for (const chunks of cutsOf("data: a\r\rdata: b\n\r\ndata: c\r\n\n\ufeffdata: d\n\n"))
    expect(eventsOf(chunks)).toEqual(["a", "b", "c"]);
});

test("an event above the limit is an error wherever it is cut, after the events before it", () => {
  for (const chunks of cutsOf(`data: a\n\ndata: ${"b".repeat(20)}\n\ndata: c\n\n`)) {
    const reader = new EventReader(20);
    const seen: string[] = [];
    for (const chunk of chunks) for (const { data } of reader.push(chunk)) seen.push(data);
    expect([seen, reader.problem]).toEqual([["a"], "sent an event of more than 20 bytes"]);
  }
});

test("an event in many reads is not read again with each", () => {
  const reader = new EventReader(Number.POSITIVE_INFINITY);
  const piece = Buffer.from("a".repeat(16));
  const startedMs = performance.now();
  for (const text of ["data: ", ...Array<Buffer>(200_000).fill(piece), "\n\n"])
    for (const { data } of reader.push(Buffer.from(text))) expect(data).toHaveLength(3_200_000);
  expect(performance.now() - startedMs).toBeLessThan(5_000);
});

const ERROR = '{"error": {"message": "é", "code": 500}}';

test.each([
  ["answer", 'data: {"choices":[]}\n\ndata: [DONE]\n\n'],
  ["answer", 'data: {"error":null,"choices":[]}\n\n'],
  ["answer", 'data: {"errors":1}\n\n'],
  ["answer", "event: message_start\r\ndata: {}\r\n\r\n"],
  ["answer", 'data: [DONE]x\n\ndata: {"error":{}}\n\n'],
  ["answer", 'data: {\ndata: "choices":[]}\n\n'],
  ["error", `data: ${ERROR}\n\ndata: [DONE]\n\n`],
  ["error", `\ufeff: ping\r\n\r\ndata:${ERROR}\r\n\r\n`],
  ["error", `id: 1\rretry: 1\rdata: {\rdata: "error"\rdata: :{}}\r\r`],
  ["error", 'data:\n\nevent: error\ndata: {"type":"error"}\n\ndata: {}\n\n'],
  ["error", `data: ${ERROR}`],
  ["done", ": ping\n\ndata:[DONE]\n\n"],
  ["done", "data: [DONE]"],
  [undefined, ": ping\n\n: ping\n\nid: 1\n\n"],
  [undefined, ""],
] as const)("the first event is %j wherever %j is cut", (kind, text) => {
  for (const chunks of cutsOf(text)) {
    const first = new FirstEvent(10_000);
    let enough = false;
    for (const chunk of chunks) {
      // What is known does not change.
      const known = first.kind;
      enough = first.push(chunk);
      if (known !== undefined) expect(first.kind).toBe(known);
      expect(enough).toBe(first.kind !== undefined);
    }
    first.end();
    expect(first.kind).toBe(kind);
    if (kind === "error" && text.includes(ERROR)) expect(first.data).toBe(ERROR);
  }
});

test("the first event is an answer as soon as it can be nothing else, and unknown above the limit", () => {
  const known = (text: string, limitBytes = 1000) => {
    const first = new FirstEvent(limitBytes);
    first.push(Buffer.from(text));
    return first.kind;
  };
  expect(known('data: {"id"')).toBe("answer");
  for (const more of [
    ": ping\n\n",
    ": pi",
    "\r\n",
    "da",
    "data: ",
    'data: {"err',
    "data: [DON",
    "data: [DONE]",
  ])
    expect(known(more)).toBeUndefined();
  for (const chunks of cutsOf(`data: ${ERROR}\n\n`)) {
    const first = new FirstEvent(20);
    expect(chunks.map((chunk) => first.push(chunk)).at(-1)).toBe(true);
    expect(first.kind).toBeUndefined();
  }
});

test("finds the error in an event's data, and its status", () => {
  const data = '{"error": {"message": "no KV", "code": 500}}';
  expect(streamedError(data)).toEqual({ status: 500, body: data });
  expect(streamedError('{"error": {"message": "x", "code": "KV_LEASE_EXPIRED"}}')?.status).toBe(
    502,
  );
  expect(streamedError('{"type":"error","error":{"type":"overloaded_error"}}')?.status).toBe(503);
  expect(streamedError('{"id":"1","error":null}')).toBeUndefined();
  expect(streamedError('{"error": {"mess')).toBeUndefined();
});
