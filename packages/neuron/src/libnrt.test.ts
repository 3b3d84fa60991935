import { expect, test } from "vitest";
import { nrtLibraryPaths, withNrtLibrary } from "./libnrt.js";

test("KV_NRT_LIBRARY is the only path; without it the loader's name and AWS's path are tried", () => {
  expect(nrtLibraryPaths({ KV_NRT_LIBRARY: "/x/libnrt.so" })).toEqual(["/x/libnrt.so"]);
  expect(nrtLibraryPaths({})).toEqual(["libnrt.so.1", "/opt/aws/neuron/lib/libnrt.so.1"]);
});

test("a missing library is skipped, and the error lists every path when none is found", () => {
  const loader = (path: string): string => {
    if (path === "here.so") return path;
    throw new Error(`${path}: cannot open shared object file: No such file or directory`);
  };
  expect(withNrtLibrary(["gone.so", "/nowhere/gone.so", "here.so"], loader)).toBe("here.so");
  expect(() => withNrtLibrary(["gone.so", "/nowhere/gone.so"], loader)).toThrowError(
    /tried gone.so: cannot open .*; \/nowhere\/gone.so: no such file/,
  );
});

test("a library that exists but does not load is not skipped", () => {
  const broken = (path: string): string => {
    throw new Error(`${path}: undefined symbol: x`);
  };
  expect(() => withNrtLibrary(["a.so", "b.so"], broken)).toThrowError(/^a.so: undefined symbol/);
});
