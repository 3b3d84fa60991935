import { expect, test } from "vitest";
import { isCapability, newCapability } from "./transfer-params.js";

test("no two capabilities are equal, and each has the form of one", () => {
  const capabilities = Array.from({ length: 2000 }, newCapability);
  expect(new Set(capabilities).size).toBe(2000);
  expect(capabilities.every(isCapability)).toBe(true);
});
