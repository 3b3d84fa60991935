import { expect, test } from "vitest";
import { EventFrames, editData, isDone, type StreamEvent } from "./event-frames.js";

function framed(chunks: readonly Uint8Array[], limitBytes?: number) {
  const frames = new EventFrames("utf8", limitBytes);
  const events = chunks.flatMap((chunk) => frames.push(chunk));
  const { problem } = frames;
  return { events: [...events, ...frames.end()], problem };
}

/** The names and the data of the events, and all bytes. */
function read(events: readonly StreamEvent[]) {
  const withData = events.filter(({ data }) => data !== "");
  const shown = withData.map(({ name, data }) => (name === "" ? data : `${name}: ${data}`));
  return { shown, bytes: Buffer.concat(events.map(({ bytes }) => bytes)).toString() };
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
  for (const mark of ["", "\ufeff"]) {
    const text = mark + LINES.join(end);
    for (const chunks of cutsOf(text)) {
      const { events } = framed(chunks);
      expect(read(events)).toEqual({ shown: ["one: é🎈\nb", "late: {\n 1}", "last"], bytes: text });
      expect(events.map(({ isCut }) => isCut).lastIndexOf(false)).toBe(events.length - 2);
    }
  }
});

test("line ends may be mixed, and only a mark at the begin of the stream is dropped", () => {
  const text = "data: a\r\rdata: b\n\r\ndata: c\r\n\n\ufeffdata: d\n\n";
  for (const chunks of cutsOf(text))
    expect(read(framed(chunks).events)).toEqual({ shown: ["a", "b", "c"], bytes: text });
});

test("an event passes with its blank line, and an LF that comes after its CR alone", () => {
  const frames = new EventFrames("utf8");
  const whole = (text: string) =>
    frames.push(Buffer.from(text)).map(({ bytes }) => bytes.toString());
  expect(whole("data: a\r\n")).toEqual([]);
  expect(whole("\r")).toEqual(["data: a\r\n\r"]);
  expect(whole("\ndata: b\n\n: c")).toEqual(["\n", "data: b\n\n"]);
});

test("an event above the limit is a problem wherever it is cut, after the events before it", () => {
  for (const chunks of cutsOf(`data: a\n\ndata: ${"b".repeat(20)}\n\ndata: c\n\n`)) {
    const { events, problem } = framed(chunks, 20);
    expect([events.map(({ data }) => data), problem]).toEqual([
      ["a"],
      "sent an event of more than 20 bytes",
    ]);
  }
});

test("an event in many reads is not read again with each", () => {
  const frames = new EventFrames("utf8");
  const piece = Buffer.from("a".repeat(16));
  const startedMs = performance.now();
  for (const text of ["data: ", ...Array<Buffer>(200_000).fill(piece), "\n\n"])
    for (const { data } of frames.push(Buffer.from(text))) expect(data).toHaveLength(3_200_000);
  expect(performance.now() - startedMs).toBeLessThan(5_000);
});

test("[DONE] may have blanks after it, and nothing else", () => {
  const { events } = framed([Buffer.from("data: [DONE] \n\ndata: [DONE]x\n\ndata:[DONE]")]);
  expect(events.map(isDone)).toEqual([true, false, true]);
});

test.each(["\n", "\r\n", "\r"])(
  "an edit of data of several lines leaves the lines as they are, with %j at their ends",
  (end) => {
    const text = "\ufeffevent: data: 1\ndata:[1,\ndata\ndata: {\n: 2\ndata:3}]\n\n".replaceAll(
      "\n",
      end,
    );
    const [event] = new EventFrames("latin1").push(Buffer.from(text));
    if (event === undefined) throw new Error("no event");
    const start = event.data.indexOf("{");
    const edits = [
      { start: 1, end: 2, text: "one" },
      { start, end: event.data.indexOf("}") + 1, text: "null" },
    ];
    const expected = "\ufeffevent: data: 1\ndata:[one,\ndata\ndata: \n: 2\ndata:null]\n\n";
    expect(editData(event, edits).toString()).toBe(expected.replaceAll("\n", end));
  },
);
