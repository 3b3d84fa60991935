import { expect, test } from "vitest";
import { missingParts, nameOfMissing, parseLoader } from "./missing-parts.js";

test("lists missing libraries, but not the undefined symbols that they cause", () => {
  const parts = parseLoader(
    [
      "\tlibc.so.6 => /lib/libc.so.6 (0x00007f)",
      "\tlibfabric.so.1 => not found",
      "\tlibcuda.so.1 => not found",
      "undefined symbol: fi_getinfo, version FABRIC_1.7\t(/x/libplugin_LIBFABRIC.so)",
    ].join("\n"),
  );
  expect(parts.map(nameOfMissing)).toEqual(["libfabric.so.1", "libcuda.so.1"]);
});

test("lists a missing symbol version once, with its library", () => {
  const line =
    "/x/libplugin_LIBFABRIC.so: /usr/lib/libfabric.so.1: version `FABRIC_1.10' not found (required by /x/libplugin_LIBFABRIC.so)";
  expect(parseLoader(`${line}\n${line}`).map(nameOfMissing)).toEqual([
    "FABRIC_1.10 of libfabric.so.1",
  ]);
});

test("lists a missing symbol, and nothing for a library that loads", () => {
  expect(parseLoader("undefined symbol: cuInit\t(/x/y.so)").map(nameOfMissing)).toEqual([
    "the symbol cuInit",
  ]);
  expect(parseLoader("\tlinux-vdso.so.1 (0x0)\n\tlibc.so.6 => /lib/libc.so.6 (0x1)\n")).toEqual([]);
});

test.runIf(process.platform === "linux")(
  "reports a non-library file and a missing file",
  async () => {
    const [text] = await missingParts(new URL(import.meta.url).pathname);
    expect(text?.kind).toBe("file");
    const [none] = await missingParts("/nowhere/lib.so");
    expect(none?.kind === "file" && none.reason).toContain("ENOENT");
  },
);
