import { setImmediate as turn } from "node:timers/promises";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { expectThrown } from "@kv/conformance/expect-error";
import type { Agent, Memory } from "@kv/interface";
import { deviceMemory, nixlTransport } from "@kv/nixl";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { faults } from "../support/fake-faults.js";
import { FAKE } from "../support/libraries.js";
import { blocksOf, listsOf, type Place } from "../support/pair.js";
import { fillPattern, scattered } from "../support/pattern.js";
import { refused } from "../support/refused.js";

const BLOCK = 4096;
const COUNT = 256;
const LENGTH = BLOCK * COUNT;
const DEVICE = 1;
const ALL = scattered(COUNT);

/**
 * Device memory of a fake NIXL: host memory of another type. The fake aborts when the addon breaks
 * one of NIXL's rules.
 */
describe.skipIf(FAKE.missing)(`memory of a device (${FAKE.missing ?? "fake found"})`, () => {
  const transport = nixlTransport(FAKE.options);
  let reader: Agent;
  let owner: Agent;
  let here: Memory;
  let there: Memory;

  const device = ({ address }: Memory, deviceId = DEVICE) =>
    deviceMemory({ address: BigInt(address), lengthBytes: LENGTH, deviceId, check: "none" });
  const table = (place: Place, count = COUNT) => blocksOf(place, BLOCK, count);

  beforeEach(async () => {
    [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
    [here, there] = [transport.allocate(LENGTH), transport.allocate(LENGTH)];
  });
  afterEach(async () => {
    faults();
    for (const agent of [reader, owner]) await agent.close();
    for (const memory of [here, there]) memory.close();
  });

  async function pair(localType: "DRAM" | "VRAM", remoteType: "DRAM" | "VRAM") {
    const mine = localType === "DRAM" ? here : device(here);
    const theirs = remoteType === "DRAM" ? there : device(there, 2);
    const registration = await reader.register(mine);
    await owner.register(theirs);
    await reader.addRemote(await owner.localMetadata());
    const lists = await listsOf(reader, mine, owner.name, theirs, BLOCK, COUNT);
    return { mine, theirs, registration, ...lists };
  }

  test.each([
    ["READ", "DRAM", "VRAM"],
    ["WRITE", "DRAM", "VRAM"],
    ["READ", "VRAM", "DRAM"],
    ["WRITE", "VRAM", "DRAM"],
    ["READ", "VRAM", "VRAM"],
    ["WRITE", "VRAM", "VRAM"],
  ] as const)(
    "%s moves every block to its place: %s here, %s there",
    async (operation, localType, remoteType) => {
      const { move } = await pair(localType, remoteType);
      const [from, to] = operation === "READ" ? [there, here] : [here, there];
      fillPattern(from.bytes, 3);
      const places = scattered(COUNT, 7);
      const inbox = owner.notifications();
      const ids = operation === "READ" ? { remoteIds: places } : { localIds: places };
      const notification = Buffer.from("landed");
      const { lengthBytes } = await move(operation, ALL, { ...ids, notification }).done;
      expect(lengthBytes).toBe(LENGTH);
      const block = (memory: Memory, index: number) =>
        Buffer.from(memory.bytes.subarray(index * BLOCK, (index + 1) * BLOCK));
      for (const [index, place] of places.entries())
        expect(block(to, index).equals(block(from, place))).toBe(true);
      expect(Buffer.from((await inbox.next()).value.payload).toString()).toBe("landed");
      await inbox.return?.();
    },
  );

  test("refuses rows outside of the memory, of another device, of an agent without it, and of another memory type", async () => {
    const { mine } = await pair("VRAM", "VRAM");
    const code = "KV_MEMORY_NOT_REGISTERED";
    const refuses = (wrong: Partial<Place>, count?: number, agent = reader) =>
      refused(agent.prepareLocal(table({ ...mine, ...wrong }, count)), code);
    await refuses({ deviceId: DEVICE + 1 });
    await refuses({}, COUNT + 1);
    await refuses({ address: mine.address - 1 });
    await refuses({}, COUNT, owner);
    const { message } = await refuses({ memoryType: "DRAM", deviceId: 0 });
    expect(message).toContain("registration of DRAM of this agent holds (it has 0)");
    // The same addresses with the other type.
    await reader.register(here);
    const { hint } = await refuses({ ...here, memoryType: "VRAM" });
    expect(hint).toContain("registered as DRAM: a list is of one memory type");
    // A list with rows of the device and of the host.
    const rows = Float64Array.of(...table(here, 1).rows, ...table(mine, 1).rows);
    const mixed = await refused(reader.prepareLocal({ memoryType: "DRAM", rows }), code);
    expect(mixed).toMatchObject({
      message: expect.stringContaining("row 1 covers"),
      hint: expect.stringContaining("registered as VRAM: a list is of one memory type"),
    });
  });

  test("refuses a peer's memory with another type or device than it was registered with", async () => {
    const { theirs } = await pair("DRAM", "VRAM");
    for (const wrong of [
      table({ ...theirs, memoryType: "DRAM" }),
      table({ ...theirs, deviceId: theirs.deviceId + 1 }),
      table(theirs, COUNT + 1),
    ])
      await refused(reader.prepareRemote(owner.name, wrong), "KV_LIST_INVALID");
  });

  test("may be registered twice, until both are closed; overlapping ranges are refused", async () => {
    const { mine, registration, local } = await pair("VRAM", "DRAM");
    await local.close();
    const again = await reader.register(device(here));
    const third = await reader.register(mine);
    expect(reader.telemetry().registrations).toBe(3);
    await third.close();
    await third.close();
    expectThrown(() => mine.close(), "KV_MEMORY_IN_USE");
    await registration.close();
    mine.close();
    const list = await reader.prepareLocal(table(mine));
    const inUse = await refused(again.close(), "KV_MEMORY_IN_USE");
    expect(inUse.message).toMatch(/1 prepared lists describe .* of device 1/);
    const part = (deviceId: number) =>
      reader.register(device({ ...here, address: here.address + BLOCK }, deviceId));
    const { message } = await refused(part(DEVICE), "KV_MEMORY_INVALID");
    expect(message).toContain("overlap");
    // Each device has its own addresses.
    await (await part(DEVICE + 1)).close();
    await list.close();
    await again.close();
    expect(reader.telemetry()).toMatchObject({ registrations: 0, preparedLists: 1 });
    await refused(reader.register(mine), "KV_MEMORY_INVALID");
    await refused(reader.prepareLocal(table(mine)), "KV_MEMORY_NOT_REGISTERED");
  });

  test("registered memory is not garbage-collected", async () => {
    setFlagsFromString("--expose-gc");
    const collect = runInNewContext("gc") as () => void;
    // Only the agent still references the handles and the registrations.
    const { move } = await pair("VRAM", "VRAM");
    for (let round = 0; round < 4; round++) {
      collect();
      await turn();
    }
    expect([reader.telemetry().registrations, owner.telemetry().registrations]).toEqual([1, 1]);
    there.bytes.fill(6);
    await move("READ", ALL).done;
    expect(here.bytes.every((byte) => byte === 6)).toBe(true);
  });

  test("a backend without such memory: the error names the backend, its memory types and the remedy", async () => {
    const agent = await transport.createAgent({ backends: [{ name: "LIBFABRIC" }] });
    const error = await refused(agent.register(device(here)), "KV_MEMORY_INVALID");
    expect(error.message).toMatch(/no backend of this agent registers VRAM.*\(LIBFABRIC: DRAM\)/);
    expect(error.hint).toContain("UCX");
    await agent.close();
  });

  test("UCX without CUDA lists VRAM but refuses it: the error has NIXL's backends and a hint", async () => {
    faults({ NO_CUDA: 1 });
    const error = await refused(reader.register(device(here)), "KV_MEMORY_INVALID");
    expect(error.message).toMatch(
      /could not register 1048576 bytes .* as VRAM.*backends: UCX: DRAM, VRAM/,
    );
    expect(error.hint).toContain("UCX_TLS");
    expect(reader.telemetry().registrations).toBe(0);
  });
});
