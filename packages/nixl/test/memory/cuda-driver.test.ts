import { existsSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { expectThrown } from "@kv/conformance/expect-error";
import type { Agent, KvErrorCode } from "@kv/interface";
import { type DeviceMemoryOptions, deviceMemory, nixlTransport } from "@kv/nixl";
import { manualClock } from "@kv/testing/manual-clock";
import { type FakeCuda, fakeCudaMissing, loadFakeCuda } from "@kv/testing/nixl/fake-cuda";
import { afterAll, beforeAll, describe, expect, test, vi } from "vitest";
import { faults } from "../support/fake-faults.js";
import { FAKE } from "../support/libraries.js";
import { listsOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";
import { refused } from "../support/refused.js";
import { movesThroughDevices } from "./device-transfer-case.js";

const LENGTH = 1 << 20;
/** This machine has the real driver. */
const hasDriver = existsSync("/dev/nvidia0");
const missing = FAKE.missing ?? fakeCudaMissing;

/** The check of device memory by the CUDA driver, with fakes of the driver and of NIXL. */
describe.skipIf(missing)(
  `device memory checked by the CUDA driver (${missing ?? "fakes found"})`,
  () => {
    const transport = nixlTransport(FAKE.options);
    let agent: Agent;
    let cuda: FakeCuda;

    beforeAll(async () => {
      agent = await transport.createAgent();
    });
    afterAll(() => transport.close());

    type Place = Pick<DeviceMemoryOptions, "address"> & Partial<DeviceMemoryOptions>;
    const registers = async (place: Place) => {
      using memory = deviceMemory({ lengthBytes: LENGTH, deviceId: 0, ...place });
      await (await agent.register(memory)).close();
    };
    const refuses = async (place: Place, why: string) => {
      const { message } = await refused(registers(place), "KV_MEMORY_INVALID");
      expect(message).toMatch(why);
    };
    const NOT_DEVICE = "the address is not device memory";
    const allocate = (deviceId: number) =>
      transport.allocate(LENGTH, { memoryType: "VRAM", deviceId });

    // Runs before another test loads it.
    test("without a loaded driver no device memory can be registered", async () => {
      await refuses({ address: 1n << 40n }, "device 0: no CUDA driver");
      if (!hasDriver) {
        const { message, hint } = expectThrown(() => allocate(0), "KV_TRANSPORT_UNSUPPORTED");
        expect(message).toContain("cannot allocate memory of a GPU: libcuda.so.1: ");
        expect(hint).toContain("NVIDIA driver");
      }
      cuda = loadFakeCuda();
    });

    test("accepts an allocation and parts of it, and nothing beyond its ends", async () => {
      const memory = allocate(1);
      const { address } = memory;
      const deviceId = 1;
      await registers({ address, deviceId });
      await registers({ address: address + 4096, lengthBytes: LENGTH - 4096, deviceId });
      await refuses(
        { address, lengthBytes: LENGTH + 1, deviceId },
        "the memory after byte 1048576 is not device memory",
      );
      await refuses({ address: address - 1, deviceId }, NOT_DEVICE);
      await refuses({ address }, "not memory of CUDA device 0: it is memory of device 1");
      memory.close();
      await refuses({ address, deviceId }, NOT_DEVICE);
    });

    test("refuses host memory", async () => {
      using memory = transport.allocate(LENGTH);
      await refuses({ address: memory.address }, NOT_DEVICE);
    });

    test("an allocation that is mapped in pieces is checked piece by piece", async () => {
      const [whole, torn] = [allocate(0).address, allocate(0).address];
      cuda.split(whole, 8192, 0);
      await registers({ address: whole });
      cuda.split(torn, 8192, 1);
      await registers({ address: torn, lengthBytes: 8192 });
      await refuses({ address: torn }, "it is memory of device 1");
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
      expect(near).toMatchObject({ memoryType: "VRAM", deviceId: 1, bytes: new Uint8Array() });
      expect(far.deviceId).toBe(0);
      const runs = Float64Array.of(65_536, 4, 0, 2, 100, 0);
      expect(new Uint8Array(await near.gather(runs))).toEqual(new Uint8Array(6));
      await far.scatter(runs, Uint8Array.of(1, 2, 3, 4, 5, 6).buffer);
      expect([...new Uint8Array(await far.gather(Float64Array.of(0, 3)))]).toEqual([5, 6, 0]);
      const other = await transport.createAgent();
      const [, registration] = [await agent.register(near), await other.register(far)];
      expectThrown(() => far.close(), "KV_MEMORY_IN_USE");
      await agent.addRemote(await other.localMetadata());
      const { move } = await listsOf(agent, near, other.name, far, LENGTH, 1);
      await move("READ", scattered(1)).done;
      expect([...new Uint8Array(await near.gather(runs))]).toEqual([1, 2, 3, 4, 5, 6]);
      await registration.close();
      await other.close();
      far.close();
      far.close();
      await refuses({ address: far.address }, NOT_DEVICE);
      await refused(far.gather(runs), "KV_MEMORY_INVALID");
    });

    test.each<[number, number, KvErrorCode, string]>([
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
      const allocates = () => transport.allocate(lengthBytes, { memoryType: "VRAM", deviceId });
      expect(expectThrown(allocates, code).message).toContain(message);
    });

    test("memory of a GPU stays until its copies have ended", async () => {
      const memory = allocate(0);
      const copied = memory.gather(Float64Array.of(0, LENGTH));
      expectThrown(() => memory.close(), "KV_MEMORY_IN_USE");
      await copied;
      memory.close();
    });

    test("memory of a GPU stays while NIXL may use it: an agent that was given up within a call keeps what it has registered", async () => {
      const clock = manualClock();
      const stuck = await nixlTransport({ ...FAKE.options, clock }).createAgent();
      const memory = allocate(0);
      await stuck.register(memory);
      await stuck.addRemote(await agent.localMetadata());
      faults({ STALL_CALLS: 3000 });
      const told = stuck.notify(agent.name, Uint8Array.of(1)).catch(() => {});
      // Calls that the thread has not begun end with `close`.
      await sleep(500);
      const closing = stuck.close({ timeoutMs: 0 });
      await new Promise((resolve) => setImmediate(resolve));
      clock.advance(5000);
      await Promise.all([closing, told]);
      expectThrown(() => memory.close(), "KV_MEMORY_IN_USE");
      faults();
      await vi.waitFor(() => memory.close(), { timeout: 15_000 });
    });
  },
);
