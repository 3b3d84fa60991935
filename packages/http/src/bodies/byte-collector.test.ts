import { expect, test } from "vitest";
import { ByteCollector } from "./byte-collector.js";

test("collects chunks of any length, and keeps none of them", () => {
  const collector = new ByteCollector();
  const chunk = Buffer.from("a");
  collector.push(chunk);
  expect(collector.take().buffer).toBe(chunk.buffer);
  expect(collector.take()).toHaveLength(0);
  const chunks = [
    "",
    "a",
    "bc",
    "d".repeat(200_000),
    ...Array.from({ length: 3000 }, (_, at) => String(at)),
  ];
  for (const text of chunks) {
    const bytes = Buffer.from(text);
    collector.push(bytes);
    if (text.length > 1) bytes.fill("x");
  }
  expect(collector.take().toString()).toBe(chunks.join(""));
});

test("copies little where the length is known, and takes at most four times the memory of what has come", () => {
  const [chunk, count] = [Buffer.alloc(64 * 1024, "x"), 64];
  const collector = new ByteCollector(count * chunk.length);
  let copies = 0;
  let before: ArrayBufferLike | undefined;
  for (let at = 1; at <= count; at += 1) {
    collector.push(chunk);
    const { buffer } = collector.begin(1);
    if (buffer !== before && at > 1) copies += 1;
    before = buffer;
    expect(at === 1 || buffer.byteLength <= 4 * at * chunk.length).toBe(true);
  }
  expect([copies, collector.take().buffer.byteLength]).toEqual([3, count * chunk.length]);
});
