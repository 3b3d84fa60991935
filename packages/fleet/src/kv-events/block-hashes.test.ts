import { expect, test } from "vitest";
import { BlockHashes } from "./block-hashes.js";

test("hashes that come, go and share entries of the table are found as in a plain map, and so are their blocks", () => {
  const table = new BlockHashes();
  const expected = new Map<string, number>();
  const wrong: string[] = [];
  let state = 1;
  const random = (below: number) => {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0;
    return (state >>> 8) % below;
  };
  for (let turn = 0; turn < 60_000; turn += 1) {
    const hash = `h${random(6_000)}`;
    const block = expected.get(hash);
    if (block === undefined) {
      if (table.find(hash) !== 0) wrong.push(hash);
      const added = table.addNotFound();
      table.addCopies(added, 0, 1);
      table.place(added, Number(hash.slice(1)) + 1);
      // From here on they are found by their blocks, too.
      if (turn > 1000 && table.numberOf(Number(hash.slice(1)) + 1) !== added) wrong.push(hash);
      expected.set(hash, added);
    } else if (random(3) > 0) {
      table.addCopies(block, 0, -1);
      table.remove(block);
      expected.delete(hash);
    }
  }
  expect(table.size).toBe(expected.size);
  expect(new Set(expected.values()).size).toBe(expected.size);
  for (let at = 0; at < 6_000; at += 1) {
    const number = expected.get(`h${at}`) ?? 0;
    if (table.find(`h${at}`) !== number) wrong.push(`h${at}`);
    if (table.numberOf(at + 1) !== number) wrong.push(`h${at}`);
  }
  expect(wrong).toEqual([]);
});

test("a number that is used again has neither the block nor the copies of the hash before", () => {
  const table = new BlockHashes();
  const add = (hash: string) => (table.find(hash) === 0 ? table.addNotFound() : 0);
  const [a, b] = [add("a"), add("b")];
  table.addCopies(a, 0, 1);
  table.addCopies(b, 3, 1);
  table.place(b, 7);
  table.addCopies(b, 3, -1);
  table.remove(b);
  const c = add("c");
  expect(c).toBe(b);
  expect([table.block(c), table.hasCopies(c), [...table.placed()]]).toEqual([0, false, []]);
});
