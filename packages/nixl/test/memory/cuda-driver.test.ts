import type { Agent } from "@kv/interface";
import { type DeviceMemoryOptions, deviceMemory, nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type CudaMemory, cudaMemory, cudaMemoryMissing, FAKE_CUDA } from "../support/cuda-memory.js";
import { movesThroughDevices } from "./device-transfer-case.js";

const LENGTH = 1 << 20;
const missing = fakeMissing ?? cudaMemoryMissing;

/** The check of device memory by the CUDA driver, with fakes of the driver and of NIXL. */
describe.skipIf(missing)(`device memory checked by the CUDA driver (${missing ?? "fakes found"})`, () => {
  const transport = nixlTransport({ library: FAKE_NIXL, backends: ["UCX"] });
  let agent: Agent;
  let cuda: CudaMemory;

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
  const accepts = async (options: DeviceMemoryOptions) => {
    const memory = deviceMemory(options);
    const registration = await agent.register(memory);
    await registration.close();
    memory.close();
  };

  // Runs before another test loads it.
  test("without a loaded driver no device memory can be registered", async () => {
    await refuses({ address: 1n << 40n, lengthBytes: LENGTH, deviceId: 0 }, /device 0: no CUDA driver/);
    cuda = cudaMemory();
    expect(cuda.open(FAKE_CUDA)).toBe(2);
  });

  test("accepts an allocation and parts of it, and nothing beyond its ends", async () => {
    const address = cuda.allocate(1, LENGTH);
    await accepts({ address, lengthBytes: LENGTH, deviceId: 1 });
    await accepts({ address: address + 4096n, lengthBytes: LENGTH - 4096, deviceId: 1 });
    await refuses(
      { address, lengthBytes: LENGTH + 1, deviceId: 1 },
      /the memory after byte 1048576 is not device memory/,
    );
    await refuses(
      { address: address - 1n, lengthBytes: LENGTH, deviceId: 1 },
      /the address is not device memory/,
    );
    cuda.free(address);
    await refuses({ address, lengthBytes: LENGTH, deviceId: 1 }, /the address is not device memory/);
  });

  test("memory of another device: the error names both devices", async () => {
    const address = cuda.allocate(1, LENGTH);
    await refuses(
      { address, lengthBytes: LENGTH, deviceId: 0 },
      /not memory of CUDA device 0: it is memory of device 1/,
    );
    cuda.free(address);
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
    const [whole, torn] = [cuda.allocate(0, LENGTH), cuda.allocate(0, LENGTH)];
    cuda.split(whole, 8192, 0);
    await accepts({ address: whole, lengthBytes: LENGTH, deviceId: 0 });
    cuda.split(torn, 8192, 1);
    await accepts({ address: torn, lengthBytes: 8192, deviceId: 0 });
    await refuses({ address: torn, lengthBytes: LENGTH, deviceId: 0 }, /it is memory of device 1/);
  });

  test.each([
    [0, 0],
    [0, 1],
  ] as const)("bytes move from device %i to device %i and back", async (first, second) => {
    await movesThroughDevices(transport, cuda, [first, second]);
  });
});
