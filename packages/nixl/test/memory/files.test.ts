import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Agent, Memory } from "@kv/interface";
import { describePlugins, findLibrary, nixlTransport, openFileMemory } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { fillPattern, scattered } from "../support/pattern.js";

const LENGTH = 10 << 20;
const BLOCK = 65_536;
const COUNT = LENGTH / BLOCK;

const [posix] =
  nixlMissing === undefined
    ? await describePlugins({ libraryPath: await findLibrary(), names: ["POSIX"] })
    : [];
const missing =
  nixlMissing ?? (posix?.loads === true ? undefined : "NIXL's POSIX plugin does not load");

describe.skipIf(missing)(`files (${missing ?? "POSIX found"})`, () => {
  const transport = nixlTransport({ backends: ["POSIX"] });
  let folder = "";
  let agent: Agent;
  let memory: Memory;

  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), "kv-files-"));
    agent = await transport.createAgent();
    memory = transport.allocate(LENGTH);
    await agent.register(memory);
  });
  afterAll(async () => {
    await transport.close();
    memory?.close();
    await rm(folder, { recursive: true, force: true });
  });

  const rows = (address: number, device: number, lengthBytes = BLOCK) =>
    Float64Array.of(address, lengthBytes, device, lengthBytes, COUNT);

  test("the capabilities list FILE", () => {
    expect(transport.capabilities).toMatchObject({
      memoryTypes: ["DRAM", "FILE"],
      notifications: false,
    });
    expect(nixlTransport({ backends: ["UCX"] }).capabilities.memoryTypes).not.toContain("FILE");
  });

  test("WRITE stores blocks in a file, and READ loads them", async () => {
    const path = join(folder, "blocks");
    const file = await openFileMemory(path, { lengthBytes: LENGTH });
    const registration = await agent.register(file);
    const local = await agent.prepareLocal({ memoryType: "DRAM", rows: rows(memory.address, 0) });
    const remote = await agent.prepareRemote(agent.name, {
      memoryType: "FILE",
      rows: rows(0, file.deviceId),
    });
    fillPattern(memory.bytes, 11);
    const written = Buffer.from(memory.bytes);
    const ids = Int32Array.from({ length: COUNT }, (_, index) => index);
    const places = scattered(COUNT, 7);
    const write = { operation: "WRITE", local, localIds: ids, remote, remoteIds: places } as const;
    expect((await agent.transfer(write).done).lengthBytes).toBe(LENGTH);
    const stored = await readFile(path);
    for (const [index, place] of places.entries()) {
      const block = (bytes: Buffer, at: number) => bytes.subarray(at * BLOCK, (at + 1) * BLOCK);
      expect(block(stored, place).equals(block(written, index))).toBe(true);
    }
    memory.bytes.fill(0);
    await agent.transfer({ ...write, operation: "READ" }).done;
    expect(written.equals(memory.bytes)).toBe(true);

    await expect(registration.close()).rejects.toMatchObject({ code: "KV_MEMORY_IN_USE" });
    expect(() => file.close()).toThrow(/registrations/);
    expect(() => agent.transfer({ ...write, notification: Buffer.from("x") })).toThrow(
      /no peer to notify/,
    );
    for (const list of [local, remote]) await list.close();
    await registration.close();
    file.close();
    file.close();
  });

  test("refuses rows outside of the file, and files of another agent", async () => {
    const file = await openFileMemory(join(folder, "short"), { lengthBytes: LENGTH - 1 });
    const registration = await agent.register(file);
    const prepare = (name: string, device: number) =>
      agent.prepareRemote(name, { memoryType: "FILE", rows: rows(0, device) });
    await expect(prepare(agent.name, file.deviceId)).rejects.toMatchObject({
      code: "KV_MEMORY_NOT_REGISTERED",
    });
    await expect(prepare(agent.name, 9999)).rejects.toMatchObject({
      code: "KV_MEMORY_NOT_REGISTERED",
    });
    await expect(prepare("somebody", file.deviceId)).rejects.toMatchObject({
      code: "KV_LIST_INVALID",
    });
    await expect(
      agent.prepareLocal({ memoryType: "FILE", rows: rows(0, file.deviceId) }),
    ).rejects.toMatchObject({ code: "KV_LIST_INVALID" });
    // A device whose id equals the file's descriptor.
    const device = {
      memoryType: "VRAM",
      rows: Float64Array.of(BLOCK, BLOCK, file.deviceId, BLOCK, 1),
    } as const;
    await expect(agent.prepareLocal(device)).rejects.toMatchObject({
      code: "KV_MEMORY_NOT_REGISTERED",
    });
    await registration.close();
    file.close();
    await expect(agent.register(file)).rejects.toMatchObject({ code: "KV_MEMORY_INVALID" });
    await expect(openFileMemory(folder, { lengthBytes: 1 })).rejects.toMatchObject({
      code: "KV_MEMORY_INVALID",
    });
  });
});

test.skipIf(nixlMissing)("a file is refused without a storage backend", async () => {
  const folder = await mkdtemp(join(tmpdir(), "kv-files-"));
  const transport = nixlTransport({ backends: ["UCX"] });
  const agent = await transport.createAgent();
  const file = await openFileMemory(join(folder, "file"), { lengthBytes: 1 });
  await expect(agent.register(file)).rejects.toMatchObject({ code: "KV_MEMORY_INVALID" });
  file.close();
  await transport.close();
  await rm(folder, { recursive: true, force: true });
});
