import { expect, test } from "vitest";
import { nrtLibraryPaths, withNrtLibrary } from "./libnrt.js";

test("a library that is named is the only one; else the loader's, and where AWS puts it", () => {
  expect(nrtLibraryPaths({ KV_NRT_LIBRARY: "/x/libnrt.so" })).toEqual(["/x/libnrt.so"]);
  expect(nrtLibraryPaths({})).toEqual(["libnrt.so.1", "/opt/aws/neuron/lib/libnrt.so.1"]);
});

test("what is not found is passed over, and told when nothing is", () => {
  const loader = (path: string): string => {
    if (path === "here.so") return path;
    throw new Error(`${path}: cannot open shared object file: No such file or directory`);
  };
  expect(withNrtLibrary(["gone.so", "/nowhere/gone.so", "here.so"], loader)).toBe("here.so");
  expect(() => withNrtLibrary(["gone.so", "/nowhere/gone.so"], loader)).toThrowError(
    /tried gone.so: cannot open .*; \/nowhere\/gone.so: no such file/,
  );
});

test("a library that is there and does not work is not passed over", () => {
  const broken = (path: string): string => {
    throw new Error(`${path}: undefined symbol: x`);
  };
  expect(() => withNrtLibrary(["a.so", "b.so"], broken)).toThrowError(/^a.so: undefined symbol/);
});
