import { expect, test } from "vitest";
import { counts, duration, hostAndPort, port, share } from "./option-values.js";

test.each([
  ["5%", 0.05],
  ["0.05", 0.05],
  ["0", 0],
  ["100%", 1],
])("a share of %s", (text, value) => expect(share(text)).toBeCloseTo(value, 9));

test.each(["101%", "-1", "x", "%", ""])("%j is not a share", (text) => expect(() => share(text)).toThrow());

test.each([
  ["90s", 90_000],
  ["2m", 120_000],
  ["500ms", 500],
  ["3", 3000],
])("a time of %s", (text, value) => expect(duration(text)).toBe(value));

test.each(["0s", "x", "5 years", ""])("%j is not a time", (text) => expect(() => duration(text)).toThrow());

test("counts, hostAndPort and port read valid values and refuse invalid ones", () => {
  expect(counts("100,300")).toEqual([100, 300]);
  expect(hostAndPort("[::1]:5600")).toEqual({ host: "::1", port: 5600 });
  expect(() => counts("100,x")).toThrow();
  expect(() => hostAndPort("host")).toThrow();
  expect([port("0"), port("5600")]).toEqual([0, 5600]);
  for (const wrong of ["65536", "-1", "x", ""]) expect(() => port(wrong)).toThrow();
});
