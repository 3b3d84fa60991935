import { expect, test } from "vitest";
import { Semaphore } from "./semaphore.js";

test("it admits as many as it has permits, and the others in the order of arrival", async () => {
  const semaphore = new Semaphore(2);
  const order: string[] = [];
  const releases = new Map<string, () => void>();
  const acquire = async (name: string) => {
    const release = await semaphore.acquire();
    order.push(name);
    releases.set(name, release);
  };
  const all = ["a", "b", "c", "d"].map(acquire);
  await Promise.all(all.slice(0, 2));
  expect(order).toEqual(["a", "b"]);
  releases.get("b")?.();
  // A caller that arrives now queues behind those that wait already.
  const late = acquire("e");
  await all[2];
  expect(order).toEqual(["a", "b", "c"]);
  for (const name of ["a", "c"]) releases.get(name)?.();
  await Promise.all([...all, late]);
  expect(order).toEqual(["a", "b", "c", "d", "e"]);
});
