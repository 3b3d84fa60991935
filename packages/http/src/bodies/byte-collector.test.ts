import { expect, test } from "vitest";
import { ByteCollector } from "./byte-collector.js";

test("collects chunks of any length, and keeps none of them", () => {
  const collector = new ByteCollector();
  const chunk = Buffer.from("a");
  collector.push(chunk);
  expect(collector.take().buffer).toBe(chunk.buffer);
  expect(collector.take()).toHaveLength(0);
  const chunks = ["", "a", "bc", "d".repeat(200_000), ...Array.from({ length: 3000 }, (_, at) => String(at))];
  for (const text of chunks) {
    const bytes = Buffer.from(text);
    collector.push(bytes);
    if (text.length > 1) bytes.fill("x");
  }
  expect(collector.take().toString()).toBe(chunks.join(""));
});
