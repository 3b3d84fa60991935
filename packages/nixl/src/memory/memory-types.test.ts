import { expect, test } from "vitest";
import { memoryTypesOf } from "./memory-types.js";

const types = (names: readonly string[], gpus: readonly string[]) =>
  memoryTypesOf(
    names.map((name) => ({ name })),
    () => gpus,
  );

test("VRAM is supported when a backend can reach it and the host has a GPU", () => {
  expect(types(["UCX"], [])).toEqual(["DRAM"]);
  expect(types(["UCX"], ["nvidia0"])).toEqual(["DRAM", "VRAM"]);
  expect(types(["LIBFABRIC"], ["nvidia0", "nvidia1"])).toEqual(["DRAM", "VRAM"]);
  expect(types(["POSIX"], ["nvidia0"])).toEqual(["DRAM", "FILE"]);
  expect(types(["POSIX", "UCX"], ["nvidia0"])).toEqual(["DRAM", "VRAM", "FILE"]);
  expect(types(["GDS"], ["nvidia0"])).toEqual(["DRAM", "VRAM", "FILE"]);
  expect(types(["OBJ"], ["nvidia0"])).toEqual(["DRAM", "OBJ"]);
  expect(types(["OF_NO_ROW"], ["nvidia0"])).toEqual(["DRAM"]);
});
