import { setImmediate as turn } from "node:timers/promises";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import type { Agent, Memory, MemoryType } from "@kv/interface";
import { deviceMemory, nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { fillPattern, scattered } from "../support/pattern.js";

const BLOCK = 4096;
const COUNT = 256;
const LENGTH = BLOCK * COUNT;
const DEVICE = 1;

/**
 * Device memory of a fake NIXL: host memory of another type. The fake aborts when the addon breaks
 * one of NIXL's rules.
 */
describe.skipIf(fakeMissing)(`memory of a device (${fakeMissing ?? "fake found"})`, () => {
  const transport = nixlTransport({ library: FAKE_NIXL, backends: ["UCX"] });
  let [reader, owner]: Agent[] = [];
  let backing: Memory[] = [];

  const device = (memory: Memory, deviceId = DEVICE) => {
    const address = BigInt(memory.address);
    return deviceMemory({ address, lengthBytes: memory.lengthBytes, deviceId, check: "none" });
  };
  const table = (memoryType: MemoryType, address: number, deviceId: number, count = COUNT) => ({
    memoryType,
    rows: Float64Array.of(address, BLOCK, deviceId, BLOCK, count),
  });
  const ids = Int32Array.from({ length: COUNT }, (_, index) => index);

  beforeEach(async () => {
    [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
    backing = [transport.allocate(LENGTH), transport.allocate(LENGTH)];
  });
  afterEach(async () => {
    delete process.env.FAKE_NIXL_NO_CUDA;
    delete process.env.FAKE_NIXL_HOLD;
    await reader?.close();
    await owner?.close();
    for (const memory of backing) memory.close();
  });

  async function pair(localType: "DRAM" | "VRAM", remoteType: "DRAM" | "VRAM") {
    const [here, there] = backing;
    if (reader === undefined || owner === undefined || here === undefined || there === undefined)
      throw new Error("no agents");
    const mine = localType === "DRAM" ? here : device(here);
    const theirs = remoteType === "DRAM" ? there : device(there, 2);
    const registration = await reader.register(mine);
    await owner.register(theirs);
    await reader.addRemote(await owner.localMetadata());
    const local = await reader.prepareLocal(table(localType, mine.address, mine.deviceId));
    const remote = await reader.prepareRemote(
      owner.name,
      table(remoteType, theirs.address, theirs.deviceId),
    );
    return { reader, owner, here, there, mine, theirs, registration, local, remote };
  }

  describe.each([
    ["DRAM", "VRAM"],
    ["VRAM", "DRAM"],
    ["VRAM", "VRAM"],
  ] as const)("%s here, %s there", (localType, remoteType) => {
    test.each(["READ", "WRITE"] as const)(
      "%s moves every block to its place",
      async (operation) => {
        const { reader, owner, here, there, local, remote } = await pair(localType, remoteType);
        const [from, to] = operation === "READ" ? [there, here] : [here, there];
        fillPattern(from.bytes, 3);
        const places = scattered(COUNT, 7);
        const [fromIds, toIds] = [places, ids];
        const inbox = owner.notifications();
        const { lengthBytes } = await reader.transfer({
          operation,
          local,
          remote,
          localIds: operation === "READ" ? toIds : fromIds,
          remoteIds: operation === "READ" ? fromIds : toIds,
          notification: Buffer.from("landed"),
        }).done;
        expect(lengthBytes).toBe(LENGTH);
        const block = (memory: Memory, index: number) =>
          Buffer.from(memory.bytes.subarray(index * BLOCK, (index + 1) * BLOCK));
        for (const [index, place] of places.entries()) {
          expect(block(to, index).equals(block(from, place))).toBe(true);
        }
        expect(Buffer.from((await inbox.next()).value.payload).toString()).toBe("landed");
        await inbox.return?.();
      },
    );
  });

  test("refuses rows outside of the memory, of another device, of an agent without it, and of another memory type", async () => {
    const { reader, owner, here, mine } = await pair("VRAM", "VRAM");
    const local = (
      agent: Agent,
      type: "DRAM" | "VRAM",
      address: number,
      deviceId: number,
      count?: number,
    ) => agent.prepareLocal(table(type, address, deviceId, count));
    const refused = { code: "KV_MEMORY_NOT_REGISTERED" };
    await expect(local(reader, "VRAM", mine.address, DEVICE + 1)).rejects.toMatchObject(refused);
    await expect(local(reader, "VRAM", mine.address, DEVICE, COUNT + 1)).rejects.toMatchObject(
      refused,
    );
    await expect(local(reader, "VRAM", mine.address - 1, DEVICE)).rejects.toMatchObject(refused);
    await expect(local(owner, "VRAM", mine.address, DEVICE)).rejects.toMatchObject(refused);
    await expect(local(reader, "DRAM", mine.address, 0)).rejects.toMatchObject({
      ...refused,
      message: expect.stringContaining("registration of DRAM of this agent holds (it has 0)"),
    });
    // The same addresses with the other type.
    await reader.register(here);
    await expect(local(reader, "VRAM", here.address, 0)).rejects.toMatchObject({
      ...refused,
      hint: expect.stringMatching(/registered as DRAM.*one memory type/),
    });
    // A list with rows of the device and of the host.
    const rows = Float64Array.of(
      here.address,
      BLOCK,
      0,
      BLOCK,
      1,
      mine.address,
      BLOCK,
      DEVICE,
      BLOCK,
      1,
    );
    await expect(reader.prepareLocal({ memoryType: "DRAM", rows })).rejects.toMatchObject({
      ...refused,
      message: expect.stringContaining("row 1 covers"),
      hint: expect.stringMatching(/registered as VRAM.*one memory type/),
    });
  });

  test("refuses a peer's memory with another type or device than it was registered with", async () => {
    const { reader, owner, theirs } = await pair("DRAM", "VRAM");
    for (const wrong of [
      table("DRAM", theirs.address, theirs.deviceId),
      table("VRAM", theirs.address, theirs.deviceId + 1),
      table("VRAM", theirs.address, theirs.deviceId, COUNT + 1),
    ]) {
      await expect(reader.prepareRemote(owner.name, wrong)).rejects.toMatchObject({
        code: "KV_LIST_INVALID",
      });
    }
  });

  test("it can be deregistered once its lists are closed, and closed once its registrations are", async () => {
    const { reader, mine, registration, local } = await pair("VRAM", "VRAM");
    await expect(registration.close()).rejects.toMatchObject({
      code: "KV_MEMORY_IN_USE",
      message: expect.stringMatching(/1 prepared lists describe .* of device 1/),
    });
    expect(() => mine.close()).toThrow(expect.objectContaining({ code: "KV_MEMORY_IN_USE" }));
    await local.close();
    await Promise.all([registration.close(), registration.close()]);
    mine.close();
    mine.close();
    await expect(reader.register(mine)).rejects.toMatchObject({ code: "KV_MEMORY_INVALID" });
    await expect(reader.prepareLocal(table("VRAM", mine.address, DEVICE))).rejects.toMatchObject({
      code: "KV_MEMORY_NOT_REGISTERED",
    });
    expect(reader.telemetry()).toMatchObject({ registrations: 0, preparedLists: 1 });
  });

  test("a transfer in progress keeps it registered", async () => {
    process.env.FAKE_NIXL_HOLD = "1";
    const { reader, registration, local, remote } = await pair("VRAM", "VRAM");
    const { done, released } = reader.transfer({
      operation: "READ",
      local,
      remote,
      localIds: ids,
      remoteIds: ids,
    });
    const closing = local.close();
    await expect(registration.close()).rejects.toMatchObject({ code: "KV_MEMORY_IN_USE" });
    process.env.FAKE_NIXL_HOLD = "0";
    await done;
    await released;
    await closing;
    await registration.close();
  });

  test("may be registered twice, until both are closed; overlapping ranges are refused", async () => {
    const { reader, mine, registration, local } = await pair("VRAM", "DRAM");
    await local.close();
    const again = await reader.register(
      deviceMemory({ address: mine.address, lengthBytes: LENGTH, deviceId: DEVICE, check: "none" }),
    );
    const third = await reader.register(mine);
    expect(reader.telemetry().registrations).toBe(3);
    await third.close();
    await third.close();
    expect(() => mine.close()).toThrow(expect.objectContaining({ code: "KV_MEMORY_IN_USE" }));
    await registration.close();
    mine.close();
    const list = await reader.prepareLocal(table("VRAM", mine.address, DEVICE));
    await expect(again.close()).rejects.toMatchObject({ code: "KV_MEMORY_IN_USE" });
    const part = (deviceId: number) =>
      deviceMemory({ address: mine.address + BLOCK, lengthBytes: LENGTH, deviceId, check: "none" });
    await expect(reader.register(part(DEVICE))).rejects.toMatchObject({
      code: "KV_MEMORY_INVALID",
      message: expect.stringContaining("overlap"),
    });
    // Each device has its own addresses.
    const elsewhere = await reader.register(part(DEVICE + 1));
    await elsewhere.close();
    await list.close();
    await again.close();
    expect(reader.telemetry().registrations).toBe(0);
  });

  test("registered memory is not garbage-collected", async () => {
    setFlagsFromString("--expose-gc");
    const collect = runInNewContext("gc") as () => void;
    // Only the agent still references the handles and the registrations.
    const lists = await pair("VRAM", "VRAM").then(({ local, remote }) => ({ local, remote }));
    for (let round = 0; round < 4; round++) {
      collect();
      await turn();
    }
    if (reader === undefined || owner === undefined) throw new Error("no agents");
    expect([reader.telemetry().registrations, owner.telemetry().registrations]).toEqual([1, 1]);
    backing[1]?.bytes.fill(6);
    await reader.transfer({ operation: "READ", ...lists, localIds: ids, remoteIds: ids }).done;
    expect(backing[0]?.bytes.every((byte) => byte === 6)).toBe(true);
  });

  test("the agent's close releases it", async () => {
    const { reader, mine } = await pair("VRAM", "VRAM");
    await reader.close();
    mine.close();
  });

  test("a backend without such memory: the error names the backend, its memory types and the remedy", async () => {
    const agent = await transport.createAgent({ backends: [{ name: "LIBFABRIC" }] });
    const [memory] = backing;
    if (memory === undefined) throw new Error("no memory");
    const refused = device(memory);
    await expect(agent.register(refused)).rejects.toMatchObject({
      code: "KV_MEMORY_INVALID",
      message: expect.stringMatching(
        /no backend of this agent registers VRAM.*\(LIBFABRIC: DRAM\)/,
      ),
      hint: expect.stringContaining("UCX"),
    });
    refused.close();
    await agent.close();
  });

  test("UCX without CUDA lists VRAM but refuses it: the error has NIXL's backends and a hint", async () => {
    process.env.FAKE_NIXL_NO_CUDA = "1";
    const [memory] = backing;
    if (memory === undefined || reader === undefined) throw new Error("no memory");
    const refused = device(memory);
    await expect(reader.register(refused)).rejects.toMatchObject({
      code: "KV_MEMORY_INVALID",
      message: expect.stringMatching(
        /could not register 1048576 bytes .* as VRAM.*backends: UCX: DRAM, VRAM/,
      ),
      hint: expect.stringContaining("UCX_TLS"),
    });
    refused.close();
    expect(reader.telemetry().registrations).toBe(0);
  });
});
