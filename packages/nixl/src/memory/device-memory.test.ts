import { expect, test } from "vitest";
import { type DeviceMemoryOptions, deviceMemory } from "./device-memory.js";

const good = { address: 0x7f00_0000_0000n, lengthBytes: 4096, deviceId: 1 };

test("has an address and a device id, but no accessible bytes", async () => {
  const memory = deviceMemory(good);
  expect(memory).toMatchObject({
    address: 0x7f00_0000_0000,
    lengthBytes: 4096,
    memoryType: "VRAM",
    deviceId: 1,
  });
  expect(memory.bytes.length).toBe(0);
  for (const copy of [
    memory.gather(Float64Array.of(0, 1)),
    memory.scatter(Float64Array.of(0, 1), new ArrayBuffer(1)),
  ]) {
    await expect(copy).rejects.toMatchObject({
      code: "KV_TRANSPORT_UNSUPPORTED",
      message: expect.stringContaining("0x7f0000000000 of device 1"),
    });
  }
  memory.close();
  memory.close();
});

test.each<[string, object, string]>([
  ["a null pointer", { address: 0n }, "null pointer"],
  ["a negative address", { address: -1n }, "address is -1"],
  ["an address of 2^53", { address: 2n ** 53n }, "address is 9007199254740992"],
  ["a fractional address", { address: 4096.5 }, "address is 4096.5"],
  ["a length of 0", { lengthBytes: 0 }, "lengthBytes is 0"],
  ["a fractional length", { lengthBytes: 0.5 }, "lengthBytes is 0.5"],
  ["an end of 2^53", { address: 2n ** 53n - 2n, lengthBytes: 2 }, "beyond 2^53"],
  ["a negative device", { deviceId: -1 }, "deviceId is -1"],
  ["a device id that is not a number", { deviceId: Number.NaN }, "deviceId is NaN"],
  ["an unknown check", { check: "rocm" }, 'check is "rocm"'],
])("%s is refused", (_, wrong, message) => {
  expect(() => deviceMemory({ ...good, ...wrong } as DeviceMemoryOptions)).toThrow(
    expect.objectContaining({
      code: "KV_MEMORY_INVALID",
      message: expect.stringContaining(message),
    }),
  );
});
