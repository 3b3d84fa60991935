import { expect, test } from "vitest";
import { parseInstanceSpec } from "./instance-spec.js";

test.each([
  ["localhost:8100", "http://localhost:8100"],
  ["http://10.0.0.1:8100/", "http://10.0.0.1:8100"],
  ["http://h:1/v1", "http://h:1"],
  ["https://h/prefix/v1/", "https://h/prefix"],
  ["[::1]:5", "http://[::1]:5"],
])("%s is read as %s", (given, url) => {
  expect(parseInstanceSpec({ url: given })).toEqual({ url });
});

test.each([
  "unix:/x.sock",
  "unix:///x.sock",
  "h:0",
  "http://h:0",
  "ftp://h:1",
  "http://u:p@h",
  "http://h?x=1",
  "http://h:99999",
  "",
  "http://",
])("%s is refused", (given) => {
  expect(() => parseInstanceSpec({ url: given })).toThrow(
    expect.objectContaining({ code: "KV_CONFIG_INVALID" }),
  );
});
