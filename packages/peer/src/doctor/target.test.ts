import { expect, test } from "vitest";
import { isLoopback, readTarget } from "./target.js";

test.each([
  ["http://p1:8000", { kind: "server", url: "http://p1:8000", host: "p1" }],
  [" https://p1/v1/ ", { kind: "server", url: "https://p1", host: "p1" }],
  ["http://[::1]:8000", { kind: "server", url: "http://[::1]:8000", host: "::1" }],
  ["p1:5600", { kind: "side-channel", host: "p1", port: 5600 }],
  ["[fe80::1]:5600", { kind: "side-channel", host: "fe80::1", port: 5600 }],
])("reads %s", (text, target) => {
  expect(readTarget(text)).toEqual(target);
});

test.each(["p1", "p1:0", "p1:70000", "http://", "http://u:p@h", "ftp://h:1", "*:5600", ""])(
  "%j is refused",
  (text) => {
    expect(() => readTarget(text)).toThrow("is not the address of a server");
  },
);

test("isLoopback is true only for addresses of the host itself", () => {
  expect(["localhost", "127.0.0.1", "127.9.9.9", "::1"].every(isLoopback)).toBe(true);
  expect(["10.0.0.1", "localhost.example", "::2"].some(isLoopback)).toBe(false);
});
