import { chmodSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { silentLog } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { afterAll, expect, it } from "vitest";
import { readHandshakeKeys } from "./keys.js";

const folder = mkdtempSync(join(tmpdir(), "kv-key-"));
afterAll(() => rmSync(folder, { recursive: true }));
const file = (text: string) => {
  const path = join(folder, `${text.length}`);
  writeFileSync(path, text, { mode: 0o600 });
  return path;
};

const keysOf = (path: string) =>
  (readHandshakeKeys("handshake_key_file", path)?.current(manualClock(), silentLog) ?? []).map(
    (key) => Buffer.from(key).toString(),
  );

it("reads the key file without its trailing newline", () => {
  expect(readHandshakeKeys("handshake_key_file", undefined)).toBeUndefined();
  expect(keysOf(file("0123456789abcdef\n"))).toEqual(["0123456789abcdef"]);
});

it("reads two keys, and reads the file again when it has changed", () => {
  const path = file("the first key of two\nthe second key of two\n");
  const clock = manualClock();
  const warnings: string[] = [];
  const log = { ...silentLog, warn: (event: string) => void warnings.push(event) };
  const keys = readHandshakeKeys("handshake_key_file", path);
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
  [0o644, "644"],
  [0o640, "640"],
  [0o620, "620"],
])(
  "a key file of mode %s causes one warning that names the mode and the command",
  (mode, named) => {
    const path = file("the key of an exposed file");
    chmodSync(path, mode);
    const clock = manualClock();
    const warnings: unknown[] = [];
    const log = { ...silentLog, warn: (...entry: unknown[]) => void warnings.push(entry) };
    const keys = readHandshakeKeys("handshake_key_file", path);
    for (let second = 0; second < 3; second += 1) {
      keys?.current(clock, log);
      clock.advance(1000);
    }
    const hint = expect.stringContaining(`chmod 600 ${path}`);
    expect(warnings).toEqual([["handshake-key-exposed", { file: path, mode: named, hint }]]);
    chmodSync(path, 0o600);
    keys?.current(clock, log);
    expect(warnings).toHaveLength(1);
  },
);

it.each([
  ["a missing file", join(folder, "none")],
  ["a short key", file("0123456789abcde")],
  ["three keys", file("0123456789abcdef\n0123456789abcdef\n0123456789abcdef\n")],
  ["an empty file", file("\n")],
  ["a number", 7],
])("%s causes an error that names the setting", (_, given) => {
  expect(() => readHandshakeKeys("handshake_key_file", given)).toThrow(/^handshake_key_file is/);
});
