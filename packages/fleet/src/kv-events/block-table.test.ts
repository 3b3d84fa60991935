import { expect, test } from "vitest";
import { BlockTable, placeHash, ROOT } from "./block-table.js";

test("blocks that come, go and share entries of the table are found as in a plain map", () => {
  const table = new BlockTable();
  const expected = new Map<string, number>();
  let state = 1;
  const random = (below: number) => {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0;
    return (state >>> 8) % below;
  };
  for (let turn = 0; turn < 60_000; turn += 1) {
    const hash = `h${random(6_000)}`;
    const block = expected.get(hash);
    if (block === undefined) {
      const added = table.add(hash);
      table.place(added, ROOT, Number(hash.slice(1)));
      expected.set(hash, added);
    } else if (random(3) > 0) {
      table.remove(block);
      expected.delete(hash);
    }
  }
  expect(table.size).toBe(expected.size);
  expect(new Set(expected.values()).size).toBe(expected.size);
  for (let at = 0; at < 6_000; at += 1) {
    expect(table.find(`h${at}`)).toBe(expected.get(`h${at}`) ?? 0);
    expect(table.at(ROOT, at)).toBe(expected.get(`h${at}`) ?? 0);
  }
});

test("a number that is used again has neither the children nor the copies of the block before", () => {
  const table = new BlockTable();
  const [a, b] = [table.add("a"), table.add("b")];
  table.place(a, ROOT, 1);
  table.place(b, a, 2);
  table.addCopies(b, 3, 1);
  table.addCopies(b, 3, -1);
  table.remove(b);
  const c = table.add("c");
  expect(c).toBe(b);
  expect([table.children(a), table.children(c), table.hasCopies(c), table.parentOf(c)]).toEqual([
    1,
    0,
    false,
    undefined,
  ]);
});

test("tokens that are chosen to fit the numbers of their parents do not bring all blocks to one entry", () => {
  const parents = Array.from({ length: 1000 }, (_, at) => at + 1);
  const fitting = (parent: number) => Math.imul(parent, 0x9e3779b1) >>> 0;
  expect(new Set(parents.map((parent) => placeHash(parent, fitting(parent)))).size).toBeGreaterThan(990);
});
