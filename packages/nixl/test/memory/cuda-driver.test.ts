import { existsSync } from "node:fs";
import type { Agent } from "@kv/interface";
import { type DeviceMemoryOptions, deviceMemory, nixlTransport } from "@kv/nixl";
import { manualClock } from "@kv/testing/manual-clock";
import { type FakeCuda, fakeCudaMissing, loadFakeCuda } from "@kv/testing/nixl/fake-cuda";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterAll, beforeAll, describe, expect, test, vi } from "vitest";
import { movesThroughDevices } from "./device-transfer-case.js";

const LENGTH = 1 << 20;
/** This machine has the real driver. */
const hasDriver = existsSync("/dev/nvidia0");
const missing = fakeMissing ?? fakeCudaMissing;

/** The check of device memory by the CUDA driver, with fakes of the driver and of NIXL. */
describe.skipIf(missing)(
  `device memory checked by the CUDA driver (${missing ?? "fakes found"})`,
  () => {
    const transport = nixlTransport({ library: FAKE_NIXL, backends: ["UCX"] });
    let agent: Agent;
    let cuda: FakeCuda;

    beforeAll(async () => {
      agent = await transport.createAgent();
    });
    afterAll(() => transport.close());

    const refuses = async (options: DeviceMemoryOptions, why: RegExp) => {
      const memory = deviceMemory(options);
      const refusal = expect.objectContaining({
        code: "KV_MEMORY_INVALID",
        message: expect.stringMatching(why),
      });
      await expect(agent.register(memory)).rejects.toEqual(refusal);
      memory.close();
    };
    const allocate = (deviceId: number) =>
      transport.allocate(LENGTH, { memoryType: "VRAM", deviceId });
    const accepts = async (options: DeviceMemoryOptions) => {
      const memory = deviceMemory(options);
      const registration = await agent.register(memory);
      await registration.close();
      memory.close();
    };

    // Runs before another test loads it.
    test("without a loaded driver no device memory can be registered", async () => {
      await refuses(
        { address: 1n << 40n, lengthBytes: LENGTH, deviceId: 0 },
        /device 0: no CUDA driver/,
      );
      if (!hasDriver) {
        expect(() => transport.allocate(LENGTH, { memoryType: "VRAM" })).toThrow(
          expect.objectContaining({
            code: "KV_TRANSPORT_UNSUPPORTED",
            message: expect.stringContaining("cannot allocate memory of a GPU: libcuda.so.1: "),
            hint: expect.stringContaining("NVIDIA driver"),
          }),
        );
      }
      cuda = loadFakeCuda();
    });

    test("accepts an allocation and parts of it, and nothing beyond its ends", async () => {
      const memory = allocate(1);
      const { address } = memory;
      await accepts({ address, lengthBytes: LENGTH, deviceId: 1 });
      await accepts({ address: address + 4096, lengthBytes: LENGTH - 4096, deviceId: 1 });
      await refuses(
        { address, lengthBytes: LENGTH + 1, deviceId: 1 },
        /the memory after byte 1048576 is not device memory/,
      );
      await refuses(
        { address: address - 1, lengthBytes: LENGTH, deviceId: 1 },
        /the address is not device memory/,
      );
      memory.close();
      await refuses(
        { address, lengthBytes: LENGTH, deviceId: 1 },
        /the address is not device memory/,
      );
    });

    test("memory of another device: the error names both devices", async () => {
      const memory = allocate(1);
      await refuses(
        { address: memory.address, lengthBytes: LENGTH, deviceId: 0 },
        /not memory of CUDA device 0: it is memory of device 1/,
      );
      memory.close();
    });

    test("refuses host memory", async () => {
      const memory = transport.allocate(LENGTH);
      await refuses(
        { address: memory.address, lengthBytes: LENGTH, deviceId: 0 },
        /the address is not device memory/,
      );
      memory.close();
    });

    test("an allocation that is mapped in pieces is checked piece by piece", async () => {
      const [whole, torn] = [allocate(0).address, allocate(0).address];
      cuda.split(whole, 8192, 0);
      await accepts({ address: whole, lengthBytes: LENGTH, deviceId: 0 });
      cuda.split(torn, 8192, 1);
      await accepts({ address: torn, lengthBytes: 8192, deviceId: 0 });
      await refuses(
        { address: torn, lengthBytes: LENGTH, deviceId: 0 },
        /it is memory of device 1/,
      );
    });

    test.each([
      [0, 0],
      [0, 1],
    ] as const)("bytes move from device %i to device %i and back", async (first, second) => {
      await movesThroughDevices(transport, [first, second]);
    });

    test("allocate gives zeroed memory of a GPU, which is copied, registered, read by a peer and closed", async () => {
      const near = allocate(1);
      const far = transport.allocate(LENGTH, { memoryType: "VRAM" });
      expect([near.memoryType, near.deviceId, far.deviceId, near.bytes.length]).toEqual([
        "VRAM",
        1,
        0,
        0,
      ]);
      const runs = Float64Array.of(65_536, 4, 0, 2, 100, 0);
      expect(new Uint8Array(await near.gather(runs))).toEqual(new Uint8Array(6));
      await far.scatter(runs, Uint8Array.of(1, 2, 3, 4, 5, 6).buffer);
      expect([...new Uint8Array(await far.gather(Float64Array.of(0, 3)))]).toEqual([5, 6, 0]);
      const other = await transport.createAgent();
      const [, registration] = [await agent.register(near), await other.register(far)];
      expect(() => far.close()).toThrow(expect.objectContaining({ code: "KV_MEMORY_IN_USE" }));
      await agent.addRemote(await other.localMetadata());
      const listOf = ({ address, deviceId }: typeof near) => ({
        memoryType: "VRAM" as const,
        rows: Float64Array.of(address, LENGTH, deviceId, LENGTH, 1),
      });
      const [local, remote] = [
        await agent.prepareLocal(listOf(near)),
        await agent.prepareRemote(other.name, listOf(far)),
      ];
      const ids = Int32Array.of(0);
      await agent.transfer({ operation: "READ", local, remote, localIds: ids, remoteIds: ids })
        .done;
      expect([...new Uint8Array(await near.gather(runs))]).toEqual([1, 2, 3, 4, 5, 6]);
      await registration.close();
      await other.close();
      const address = far.address;
      far.close();
      far.close();
      await refuses(
        { address, lengthBytes: LENGTH, deviceId: 0 },
        /the address is not device memory/,
      );
      await expect(far.gather(runs)).rejects.toMatchObject({ code: "KV_MEMORY_INVALID" });
    });

    test.each([
      [2, LENGTH, "KV_TRANSPORT_UNSUPPORTED", "of GPU 2: this process sees 2 GPUs"],
      [1, 2 ** 50, "KV_MEMORY_INVALID", "of GPU 1: out of memory (CUDA error 2)"],
      [-1, LENGTH, "KV_MEMORY_INVALID", "of device -1: the length is a positive integer"],
      [
        2 ** 32,
        LENGTH,
        "KV_MEMORY_INVALID",
        "of device 4294967296: the length is a positive integer",
      ],
      [0, 0, "KV_MEMORY_INVALID", "cannot allocate 0 bytes of device 0"],
    ])("allocate on GPU %i of %i bytes: %s", (deviceId, lengthBytes, code, message) => {
      expect(() => transport.allocate(lengthBytes, { memoryType: "VRAM", deviceId })).toThrow(
        expect.objectContaining({ code, message: expect.stringContaining(message) }),
      );
    });

    test("memory of a GPU stays until its copies have ended", async () => {
      const memory = transport.allocate(LENGTH, { memoryType: "VRAM" });
      const copied = memory.gather(Float64Array.of(0, LENGTH));
      expect(() => memory.close()).toThrow(expect.objectContaining({ code: "KV_MEMORY_IN_USE" }));
      await copied;
      memory.close();
    });

    test("memory of a GPU stays while NIXL may use it: an agent that was given up within a call keeps what it has registered", async () => {
      const clock = manualClock();
      const stuck = await nixlTransport({
        library: FAKE_NIXL,
        backends: ["UCX"],
        clock,
      }).createAgent();
      const memory = allocate(0);
      await stuck.register(memory);
      await stuck.addRemote(await agent.localMetadata());
      process.env.FAKE_NIXL_STALL_CALLS = "3000";
      const told = stuck.notify(agent.name, Uint8Array.of(1)).catch(() => {});
      const closing = stuck.close({ timeoutMs: 0 });
      await new Promise((resolve) => setImmediate(resolve));
      clock.advance(5000);
      await Promise.all([closing, told]);
      expect(() => memory.close()).toThrow(expect.objectContaining({ code: "KV_MEMORY_IN_USE" }));
      delete process.env.FAKE_NIXL_STALL_CALLS;
      await vi.waitFor(() => memory.close(), { timeout: 15_000 });
    });
  },
);
