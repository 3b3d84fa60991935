import { expect, test } from "vitest";
import { memoryTypesOf } from "./memory-types.js";

test.each([
  [["UCX"], [], ["DRAM"]],
  [["UCX"], ["nvidia0"], ["DRAM", "VRAM"]],
  [["LIBFABRIC"], ["nvidia0", "nvidia1"], ["DRAM", "VRAM"]],
  [["POSIX"], ["nvidia0"], ["DRAM", "FILE"]],
  [["POSIX", "UCX"], ["nvidia0"], ["DRAM", "VRAM", "FILE"]],
  [["GDS"], ["nvidia0"], ["DRAM", "VRAM", "FILE"]],
  [["OBJ"], ["nvidia0"], ["DRAM", "OBJ"]],
  [["OF_NO_ROW"], ["nvidia0"], ["DRAM"]],
])("%j on a host with the GPUs %j: %j", (names, gpus, types) => {
  const backends = names.map((name) => ({ name }));
  expect(memoryTypesOf(backends, () => gpus)).toEqual(types);
});
