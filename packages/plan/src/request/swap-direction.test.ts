import { describe, expect, it } from "vitest";
import { swapDirection } from "./swap-direction.js";

describe("swapDirection", () => {
  it("exchanges the ids of pairs", () => {
    const localIds = Int32Array.of(1, 2);
    const remoteIds = Int32Array.of(7, 9);
    expect(swapDirection({ localIds, remoteIds })).toEqual({
      localIds: remoteIds,
      remoteIds: localIds,
    });
  });

  it("exchanges the ids of runs, and keeps the counts and the input array", () => {
    const runs = Int32Array.of(1, 7, 3, 20, 40, 5);
    expect(swapDirection({ runs })).toEqual({ runs: Int32Array.of(7, 1, 3, 40, 20, 5) });
    expect(runs).toEqual(Int32Array.of(1, 7, 3, 20, 40, 5));
    expect(swapDirection({ runs, offsets: Int32Array.of(0, 100, 5, 105) })).toEqual({
      runs: Int32Array.of(7, 1, 3, 40, 20, 5),
      offsets: Int32Array.of(100, 0, 105, 5),
    });
  });
});
