import { describe, expect, it } from "vitest";
import { OldestFirst } from "./references.js";

function oldestFirst(keys: readonly string[]): OldestFirst<string, number> {
  const map = new OldestFirst<string, number>();
  for (const [value, key] of keys.entries()) map.set(key, value);
  return map;
}

/** The keys from the oldest to the newest; the map is empty then. */
function drained(map: OldestFirst<string, number>): string[] {
  const keys: string[] = [];
  for (let { oldest } = map; oldest !== undefined; { oldest } = map) {
    keys.push(oldest.key);
    map.delete(oldest.key);
  }
  return keys;
}

describe("oldest first", () => {
  it("gives its entries in the order in which they were set", () => {
    const map = oldestFirst(["a", "b", "c"]);
    expect([map.size, map.get("b"), map.has("x"), map.oldest?.value]).toEqual([3, 1, false, 0]);
    expect(drained(map)).toEqual(["a", "b", "c"]);
    expect([map.size, map.oldest]).toEqual([0, undefined]);
  });

  it("keeps the order when an entry leaves at the begin, in the middle or at the end", () => {
    for (const gone of ["a", "b", "c"]) {
      const map = oldestFirst(["a", "b", "c"]);
      expect([map.delete(gone), map.delete(gone)]).toEqual([true, false]);
      map.set("d", 3);
      expect(drained(map)).toEqual(["a", "b", "c", "d"].filter((key) => key !== gone));
    }
  });

  it("makes an entry that is set again the newest", () => {
    const map = oldestFirst(["a", "b", "c"]);
    map.set("a", 7);
    expect([map.size, map.get("a")]).toEqual([3, 7]);
    expect(drained(map)).toEqual(["b", "c", "a"]);
  });

  it("is empty after clear", () => {
    const map = oldestFirst(["a", "b"]);
    map.clear();
    map.set("c", 0);
    expect(drained(map)).toEqual(["c"]);
  });
});
