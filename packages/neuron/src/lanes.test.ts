import { expect, test } from "vitest";
import { createLanes } from "./lanes.js";

test("so many are in at once, and the others come in the order of arrival", async () => {
  const lanes = createLanes(2);
  const order: string[] = [];
  const out = new Map<string, () => void>();
  const go = async (name: string) => {
    const leave = await lanes.enter();
    order.push(name);
    out.set(name, leave);
  };
  const all = ["a", "b", "c", "d"].map(go);
  await Promise.all(all.slice(0, 2));
  expect(order).toEqual(["a", "b"]);
  out.get("b")?.();
  // One who comes now is behind those who wait.
  const late = go("e");
  await all[2];
  expect(order).toEqual(["a", "b", "c"]);
  for (const name of ["a", "c"]) out.get(name)?.();
  await Promise.all([...all, late]);
  expect(order).toEqual(["a", "b", "c", "d", "e"]);
});
