import { expect, test } from "vitest";
import { objectMemory } from "./storage-memory.js";

test("each object memory has its own device id, even for the same key", () => {
  const [one, other] = [1, 2].map(() => objectMemory("key", { lengthBytes: 8 }));
  expect(one).toMatchObject({ memoryType: "OBJ", address: 0, lengthBytes: 8 });
  expect(one?.deviceId).not.toBe(other?.deviceId);
});

test.each(["", "a\0b", "é".repeat(513), undefined, 7])("the key %j is refused", (key) => {
  expect(() => objectMemory(key as string, { lengthBytes: 8 })).toThrow("the key of an object");
});

test.each([0, -1, 1.5, Number.NaN, "8", undefined])("%j bytes are refused", (lengthBytes) => {
  expect(() => objectMemory("key", { lengthBytes: lengthBytes as number })).toThrow(
    "not a positive integer",
  );
});
