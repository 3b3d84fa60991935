import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { silentLog } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { afterAll, expect, it } from "vitest";
import { readHandshakeKeys } from "./handshake-key.js";

const folder = mkdtempSync(join(tmpdir(), "kv-key-"));
afterAll(() => rmSync(folder, { recursive: true }));
const file = (text: string) => {
  const path = join(folder, `${text.length}`);
  writeFileSync(path, text);
  return path;
};

const keysOf = (path: string) =>
  (readHandshakeKeys({ handshake_key_file: path })?.current(manualClock(), silentLog) ?? []).map((key) =>
    Buffer.from(key).toString(),
  );

it("reads the key file without its trailing newline", () => {
  expect(readHandshakeKeys({})).toBeUndefined();
  expect(keysOf(file("0123456789abcdef\n"))).toEqual(["0123456789abcdef"]);
});

it("reads two keys, and reads the file again when it has changed", () => {
  const path = file("the first key of two\nthe second key of two\n");
  const clock = manualClock();
  const warnings: string[] = [];
  const log = { ...silentLog, warn: (event: string) => void warnings.push(event) };
  const keys = readHandshakeKeys({ handshake_key_file: path });
  const current = () => (keys?.current(clock, log) ?? []).map((key) => Buffer.from(key).toString());
  expect(current()).toEqual(["the first key of two", "the second key of two"]);
  writeFileSync(path, "the key that comes next");
  expect(current()).toHaveLength(2);
  clock.advance(1000);
  expect(current()).toEqual(["the key that comes next"]);
  writeFileSync(path, "short");
  clock.advance(1000);
  expect(current()).toEqual(["the key that comes next"]);
  expect(warnings).toEqual(["handshake-key-not-read"]);
});

it.each([
  ["a missing file", join(folder, "none")],
  ["a short key", file("0123456789abcde")],
  ["three keys", file("0123456789abcdef\n0123456789abcdef\n0123456789abcdef\n")],
  ["an empty file", file("\n")],
  ["a number", 7],
])("%s causes an error that names the setting", (_, given) => {
  expect(() => readHandshakeKeys({ handshake_key_file: given })).toThrow(
    /^kv_connector_extra_config\.handshake_key_file is/,
  );
});
