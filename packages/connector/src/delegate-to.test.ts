import { expect, test } from "vitest";
import { delegateTo } from "./multi-connector.js";

class Counter {
  #count = 0;
  name = "counter";
  add(): number {
    this.#count += 1;
    return this.#count;
  }
  get size(): number {
    return this.#count;
  }
}

test("methods of the target keep access to its private fields, and overrides replace members", () => {
  const counter = new Counter();
  const wrapped = delegateTo(counter, { name: "wrapped" });
  const { add } = wrapped;
  expect(add()).toBe(1);
  expect([wrapped.size, wrapped.name, counter.name]).toEqual([1, "wrapped", "counter"]);
});
