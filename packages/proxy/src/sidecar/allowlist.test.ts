import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import { Allowlist } from "./allowlist.js";

test.each([
  ["10.0.0.0/8", "http://10.255.0.1:8000", true],
  ["10.0.0.0/8", "http://11.0.0.1:8000", false],
  ["10.1.2.3", "http://10.1.2.3:1", true],
  ["10.1.2.3", "http://10.1.2.4:1", false],
  ["10.1.2.3:8000", "http://10.1.2.3:8000", true],
  ["10.1.2.3:8000", "http://10.1.2.3:8001", false],
  ["10.0.0.0/8:80", "http://10.1.2.3", true],
  ["10.0.0.0/8:443", "https://10.1.2.3", true],
  ["fd00::/8", "http://[fd12::1]:8000", true],
  ["fd00::/8", "http://[fe80::1]:8000", false],
  ["[fd00::/8]:8000", "http://[fd12::1]:8000", true],
  ["[fd00::/8]:8000", "http://[fd12::1]:9000", false],
  ["0.0.0.0/0", "http://p.example.org:8000", false],
  ["0.0.0.0/0", "http://[fd12::1]:8000", false],
  ["p.example.org", "http://P.example.org:8000", true],
  ["p.example.org", "http://q.example.org:8000", false],
  ["p.example.org", "http://p.example.org.evil:8000", false],
  ["*.example.org", "http://a.b.example.org:8000", true],
  ["*.example.org", "http://example.org:8000", false],
  ["*.example.org", "http://evilexample.org:8000", false],
  ["*.1", "http://10.0.0.1:8000", false],
  ["*", "http://anything:1", true],
  ["*:8000", "http://anything:1", false],
])("%s and %s: %s", (entry, url, allowed) => {
  expect(new Allowlist([entry]).allows(url)).toBe(allowed);
});

test("without entries nothing is allowed", () => {
  expect(new Allowlist([]).allows("http://10.0.0.1:1")).toBe(false);
});

test.each([
  "",
  "10.0.0.0/33",
  "10.0.0.0/x",
  "fd00::/129",
  "a b",
  "http://p",
  "p:0",
  "p:99999",
  "*p",
  "[p]:1",
  "a*.b",
])("the entry %j is refused", (entry) => {
  try {
    new Allowlist([entry]);
    expect.unreachable();
  } catch (error) {
    expect(KvError.is(error, "KV_CONFIG_INVALID")).toBe(true);
    expect(String(error)).toContain(`"${entry}"`);
  }
});
