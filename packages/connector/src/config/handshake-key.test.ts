import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, expect, it } from "vitest";
import { readHandshakeKey } from "./handshake-key.js";

const folder = mkdtempSync(join(tmpdir(), "kv-key-"));
afterAll(() => rmSync(folder, { recursive: true }));
const file = (text: string) => {
  const path = join(folder, `${text.length}`);
  writeFileSync(path, text);
  return path;
};

it("reads the key file without its trailing newline", () => {
  expect(readHandshakeKey({})).toBeUndefined();
  expect(
    Buffer.from(readHandshakeKey({ handshake_key_file: file("0123456789abcdef\n") }) ?? []).toString(),
  ).toBe("0123456789abcdef");
});

it.each([
  ["a missing file", join(folder, "none")],
  ["a short key", file("0123456789abcde")],
  ["a number", 7],
])("%s causes an error that names the setting", (_, given) => {
  expect(() => readHandshakeKey({ handshake_key_file: given })).toThrow(
    /^kv_connector_extra_config\.handshake_key_file is/,
  );
});
