import { expect, test } from "vitest";
import { printable, withCommands } from "./print.js";

const ALL = Array.from({ length: 0x10000 }, (_, code) => String.fromCharCode(code));

test("what a terminal obeys is shown, everything else stays", () => {
  expect(printable("a\u001b]0;title\u0007\r\n\tb\u009b2J\u007f\u202e")).toBe(
    "a\\u001b]0;title\\u0007\\u000d\n\tb\\u009b2J\\u007f\\u202e",
  );
  const changed = ALL.filter((character) => printable(character) !== character);
  const codes = changed.map((character) => character.charCodeAt(0));
  const range = (from: number, to: number) =>
    Array.from({ length: to - from + 1 }, (_, at) => from + at);
  expect(codes).toEqual([
    ...range(0, 8),
    ...range(0x0b, 0x1f),
    ...range(0x7f, 0x9f),
    0x061c,
    ...range(0x200e, 0x200f),
    ...range(0x202a, 0x202e),
    ...range(0x2066, 0x2069),
  ]);
  expect(printable("λ 漢字 👩‍🚀 “…”")).toBe("λ 漢字 👩‍🚀 “…”");
});

test("first-contact.md: hints name the command that works, in a checkout and where the packages are installed", () => {
  const hint = "run: npx --no-install kv-nixl install --version 1.5.1";
  expect(withCommands(hint, true)).toBe("run: npm run kv-nixl -- install --version 1.5.1");
  expect(withCommands(hint, false)).toBe(hint);
});

test("JSON means the same, although JSON.stringify leaves DEL, C1 and the direction marks as they are", () => {
  const value = { text: ALL.join(""), ["\u009b"]: "\\\u007f" };
  expect(JSON.stringify("\u007f\u009b\u202e")).toBe('"\u007f\u009b\u202e"');
  const text = printable(JSON.stringify(value, null, 2));
  expect(JSON.parse(text)).toEqual(value);
  expect(printable(text)).toBe(text);
});
