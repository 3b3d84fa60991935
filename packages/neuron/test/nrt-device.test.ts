import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { platformSuite } from "@kv/conformance/platform";
import { describe, expect, test } from "vitest";
import { neuronPlatform, nrtDevice } from "../src/index.js";
import { stagingOn } from "./config.js";

/**
 * A stand-in for libnrt. It implements the documented calls and ends the process when they come in
 * a wrong order.
 */
const libraryPath = fileURLToPath(new URL("../../../native/build/libfake_nrt.so", import.meta.url));
const absent = process.platform !== "linux" || !existsSync(libraryPath);

describe.skipIf(absent)(
  absent ? "libnrt: its stand-in is not built (node native/build.mjs)" : "libnrt",
  () => {
    platformSuite({
      name: "neuron on a stand-in for libnrt",
      create: neuronPlatform,
      settings: { prefixCaching: false, maxNumSeqs: 1 },
      refusedSettings: [{ prefixCaching: true }],
      staging: () => stagingOn(nrtDevice({ libraryPath })),
    });

    test("a missing library, and another library, are errors with the reason", () => {
      expect(() => nrtDevice({ libraryPath: "/nowhere/libnrt.so.1" })).toThrowError(/nowhere/);
      const other = fileURLToPath(
        new URL("../../../native/build/libfake_nixl_capi.so", import.meta.url),
      );
      expect(() => nrtDevice({ libraryPath: other })).toThrowError(/has no nrt_init/);
    });

    test("a failed call of the runtime is KV_STAGING_FAILED with its status", async () => {
      const device = nrtDevice({ libraryPath });
      expect(() => device.allocate(2 ** 31)).toThrowError(/NRT_STATUS 4/);
      const memory = device.allocate(64);
      expect(() => memory.bytes).toThrowError(/not addressable/);
      await expect(memory.gather(Float64Array.of(60, 8))).rejects.toMatchObject({
        code: "KV_MEMORY_INVALID",
      });
      await memory.scatter(
        Float64Array.of(0, 4, 8, 4),
        new Uint8Array([1, 2, 3, 4, 5, 6, 7, 8]).buffer,
      );
      expect([...new Uint8Array(await memory.gather(Float64Array.of(2, 8)))]).toEqual([
        3, 4, 0, 0, 0, 0, 5, 6,
      ]);
      expect(device.counts).toEqual({ copies: 2, bytesRead: 8, bytesWritten: 8 });
      await device.close();
    });

    test("scatter takes its source over, so that nobody can free it while it is copied", async () => {
      const device = nrtDevice({ libraryPath });
      const memory = device.allocate(64);
      const source = new ArrayBuffer(8);
      const copied = memory.scatter(Float64Array.of(0, 8), source);
      expect(source.byteLength).toBe(0);
      await copied;
      await expect(memory.gather(Float64Array.of(0, 64, 0, 1))).rejects.toMatchObject({
        code: "KV_MEMORY_INVALID",
      });
      await device.close();
    });

    test("a copy that the runtime fails is KV_STAGING_FAILED, and the next one works", async () => {
      const device = nrtDevice({ libraryPath });
      const memory = device.allocate(64);
      process.env["KV_FAKE_NRT_FAIL"] = "nrt_tensor_read";
      const failed = memory.gather(Float64Array.of(0, 8));
      await expect(failed).rejects.toMatchObject({
        code: "KV_STAGING_FAILED",
        message: expect.stringContaining("NRT_STATUS 1"),
      });
      delete process.env["KV_FAKE_NRT_FAIL"];
      expect((await memory.gather(Float64Array.of(0, 8))).byteLength).toBe(8);
      await device.close();
    });
  },
);
