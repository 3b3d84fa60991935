import { expect, test } from "vitest";
import { BlockChanges } from "./block-changes.js";

const keyOf = (number: number) => Buffer.alloc(36, `key ${number}; `);

/** Follows a history as a router does. */
function reader(changes: BlockChanges) {
  const present = new Set<string>();
  let [epoch, after, pages] = ["", 0, 0];
  const read = () => {
    for (let more = true; more; pages += 1) {
      const page = changes.page(epoch, after);
      if (page.epoch !== epoch) present.clear();
      for (const change of page.changes) {
        if (change.startsWith("+")) present.add(change.slice(1));
        else present.delete(change.slice(1));
      }
      [epoch, after, more] = [page.epoch, page.next, page.more];
    }
    return present.size;
  };
  return { read, pages: () => pages };
}

test("a reader has what the pool has: page by page, and anew when the history begins again", () => {
  const changes = new BlockChanges();
  for (let number = 0; number < 2500; number += 1) changes.added(keyOf(number));
  const early = reader(changes);
  expect(early.read()).toBe(2500);
  expect(early.pages()).toBe(3);
  for (let number = 0; number < 100; number += 1) changes.removed(keyOf(number));
  expect(early.read()).toBe(2400);

  // So many have come and left that the history is made anew.
  for (let number = 3000; number < 43_000; number += 1) {
    changes.added(keyOf(number));
    changes.removed(keyOf(number));
  }
  expect(early.read()).toBe(2400);
  const late = reader(changes);
  expect(late.read()).toBe(2400);
  expect(late.pages()).toBeLessThan(30);
  // What no page ever named is answered from the beginning.
  expect(changes.page("", -1)).toMatchObject({ next: 1000, more: true });
  expect(changes.page("another", 10)).toMatchObject({ next: 1000, more: true });
});
