import { Command } from "commander";
import { expect, test } from "vitest";
import {
  count,
  duration,
  hostAndPort,
  listenAddress,
  listOf,
  oneOf,
  port,
  positiveNumber,
  share,
  size,
} from "./flag-values.js";

test.each([
  ["5%", 0.05],
  ["0.05", 0.05],
  ["0", 0],
  ["100%", 1],
])("a share of %s", (text, value) => expect(share(text)).toBeCloseTo(value, 9));

test.each(["101%", "-1", "x", "%", ""])("%j is not a share", (text) =>
  expect(() => share(text)).toThrow(),
);

test.each([
  ["90s", 90_000],
  ["2m", 120_000],
  ["500ms", 500],
  ["3", 3000],
])("a time of %s", (text, value) => expect(duration(text)).toBe(value));

test.each(["0s", "x", "5 years", ""])("%j is not a time", (text) =>
  expect(() => duration(text)).toThrow(),
);

test("addresses and ports", () => {
  expect(hostAndPort("[::1]:5600")).toEqual({ host: "::1", port: 5600 });
  for (const wrong of ["host", "host:0", "host:65536", ":1", ""])
    expect(() => hostAndPort(wrong), wrong).toThrow();
  expect(listenAddress("10.0.0.7:0")).toEqual({ host: "10.0.0.7", port: 0 });
  expect(listenAddress("18515")).toEqual({ host: "127.0.0.1", port: 18_515 });
  for (const wrong of ["host", "x:65536", ""]) expect(() => listenAddress(wrong), wrong).toThrow();
  expect([port("0"), port("5600")]).toEqual([0, 5600]);
  for (const wrong of ["65536", "-1", "x", "", "1e3", " 1"])
    expect(() => port(wrong), wrong).toThrow();
});

test("sizes and numbers", () => {
  expect(["65536", "64KiB", "64k", "1GiB", "5B"].map(size)).toEqual([
    65_536,
    65_536,
    65_536,
    2 ** 30,
    5,
  ]);
  for (const wrong of ["", "k", "-1", "1.5k", "1TiB"]) expect(() => size(wrong), wrong).toThrow();
  expect(positiveNumber("0.5")).toBe(0.5);
  for (const wrong of ["0", "-1", "", "x", "Infinity"])
    expect(() => positiveNumber(wrong), wrong).toThrow();
});

test("lists and words; a value that is not taken is an error of commander's", () => {
  expect(listOf(count)("100, 300")).toEqual([100, 300]);
  for (const wrong of ["100,x", "100,,300", ""])
    expect(() => listOf(count)(wrong), wrong).toThrow();
  expect(listOf(oneOf("READ", "WRITE"))("read,WRITE")).toEqual(["READ", "WRITE"]);
  const command = new Command("program").exitOverride().configureOutput({ writeErr() {} });
  command.option("--order <name>", "", oneOf("first", "last"));
  expect(() => command.parse(["--order", "middle"], { from: "user" })).toThrow(
    "option '--order <name>' argument 'middle' is invalid. It must be one of first, last.",
  );
});
