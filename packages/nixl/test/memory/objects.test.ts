import type { Agent, Memory, Transport } from "@kv/interface";
import { describePlugins, findLibrary, nixlTransport, objectMemory } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type ObjectStore, startObjectStore } from "../support/object-store.js";
import { fillPattern, scattered } from "../support/pattern.js";

const BLOCK = 65_536;
const COUNT = 24;
const LENGTH = BLOCK * COUNT;

const [plugin] =
  nixlMissing === undefined
    ? await describePlugins({ libraryPath: await findLibrary(), names: ["OBJ"] })
    : [];
const missing =
  nixlMissing ?? (plugin?.loads === true ? undefined : "NIXL's OBJ plugin does not load");

describe.skipIf(missing)(`objects of a store (${missing ?? "OBJ found"})`, () => {
  let store: ObjectStore;
  let transport: Transport;
  let agent: Agent;
  let memory: Memory;

  beforeAll(async () => {
    store = await startObjectStore();
    const parameters = {
      endpoint_override: `http://127.0.0.1:${store.port}`,
      scheme: "http",
      bucket: "kv",
      region: "us-east-1",
      access_key: "any",
      secret_key: "any",
      // Bodies without chunks and trailing checksums.
      req_checksum: "required",
    };
    transport = nixlTransport({ backends: [{ name: "OBJ", parameters }] });
    agent = await transport.createAgent();
    memory = transport.allocate(LENGTH);
    await agent.register(memory);
  });
  afterAll(async () => {
    await transport?.close();
    memory?.close();
    await store?.close();
  });

  const dram = (lengthBytes = BLOCK) =>
    agent.prepareLocal({
      memoryType: "DRAM",
      rows: Float64Array.of(memory.address, lengthBytes, 0, lengthBytes, LENGTH / lengthBytes),
    });
  const listOf = (...rows: number[][]) =>
    agent.prepareRemote(agent.name, { memoryType: "OBJ", rows: Float64Array.from(rows.flat()) });
  const whole = ({ lengthBytes, deviceId }: Memory) => [0, lengthBytes, deviceId, 0, 1];
  const first = Int32Array.of(0);

  test("the capabilities list OBJ", () => {
    expect(transport.capabilities).toMatchObject({
      memoryTypes: ["DRAM", "OBJ"],
      notifications: false,
    });
  });

  test("WRITE stores blocks in objects, and READ loads them, whole and in parts", async () => {
    const objects = Array.from({ length: COUNT }, (_, index) =>
      objectMemory(`blocks/${index} of ${COUNT}`, { lengthBytes: BLOCK }),
    );
    const registrations = await Promise.all(objects.map((object) => agent.register(object)));
    const [local, remote] = [await dram(), await listOf(...objects.map(whole))];
    fillPattern(memory.bytes, 3);
    const written = Buffer.from(memory.bytes);
    const ids = Int32Array.from({ length: COUNT }, (_, index) => index);
    const places = scattered(COUNT, 7);
    const write = { operation: "WRITE", local, localIds: ids, remote, remoteIds: places } as const;
    expect((await agent.transfer(write).done).lengthBytes).toBe(LENGTH);
    expect(store.objects.size).toBe(COUNT);
    for (const [index, place] of places.entries()) {
      const stored = store.objects.get(`/kv/blocks/${place} of ${COUNT}`);
      expect(stored?.equals(written.subarray(index * BLOCK, (index + 1) * BLOCK))).toBe(true);
    }
    memory.bytes.fill(0);
    await agent.transfer({ ...write, operation: "READ" }).done;
    expect(written.equals(memory.bytes)).toBe(true);

    // The second half of an object, into the first half of the memory.
    const [small, halves] = [
      await dram(BLOCK / 2),
      await listOf([0, BLOCK / 2, objects[places[5] ?? 0]?.deviceId ?? 0, BLOCK / 2, 2]),
    ];
    const half = {
      local: small,
      localIds: first,
      remote: halves,
      remoteIds: Int32Array.of(1),
    } as const;
    await agent.transfer({ operation: "READ", ...half }).done;
    const wanted = written.subarray(5.5 * BLOCK, 6 * BLOCK);
    expect(wanted.equals(memory.bytes.subarray(0, BLOCK / 2))).toBe(true);
    expect(() => agent.transfer({ operation: "WRITE", ...half })).toThrow(
      /WRITE replaces an object/,
    );
    expect(() => agent.transfer({ ...write, notification: Buffer.from("x") })).toThrow(
      /no peer to notify/,
    );

    await expect(registrations[0]?.close()).rejects.toMatchObject({ code: "KV_MEMORY_IN_USE" });
    for (const list of [local, remote, small, halves]) await list.close();
    for (const registration of registrations) await registration.close();
    for (const object of objects) object.close();
  });

  test("an object longer than a slice is one request; rows shorter than the object are refused", async () => {
    const lengthBytes = 40 << 20;
    const large = transport.allocate(lengthBytes);
    const object = objectMemory("large", { lengthBytes });
    const registrations = [await agent.register(large), await agent.register(object)];
    const rows = Float64Array.of(
      large.address,
      lengthBytes,
      0,
      0,
      1,
      large.address,
      BLOCK,
      0,
      0,
      1,
    );
    const local = await agent.prepareLocal({ memoryType: "DRAM", rows });
    const [all, part] = [
      await listOf(whole(object)),
      await listOf([0, BLOCK, object.deviceId, 0, 1]),
    ];
    store.objects.set("/kv/large", Buffer.alloc(lengthBytes, 5));
    const write = { operation: "WRITE", local, localIds: first, remoteIds: first } as const;
    expect(() => agent.transfer({ ...write, localIds: Int32Array.of(1), remote: part })).toThrow(
      /WRITE replaces an object/,
    );
    expect(store.objects.get("/kv/large")?.length).toBe(lengthBytes);
    await agent.transfer({ ...write, operation: "READ", remote: all }).done;
    expect(large.bytes.every((byte) => byte === 5)).toBe(true);
    fillPattern(large.bytes, 8);
    await agent.transfer({ ...write, remote: all }).done;
    expect(store.objects.get("/kv/large")?.equals(large.bytes)).toBe(true);
    for (const list of [local, all, part]) await list.close();
    for (const registration of registrations) await registration.close();
    large.close();
  });

  test("refuses rows outside of the object, absent objects, and objects of another agent", async () => {
    const object = objectMemory("absent", { lengthBytes: BLOCK });
    const registration = await agent.register(object);
    await expect(listOf([1, BLOCK, object.deviceId, 0, 1])).rejects.toMatchObject({
      code: "KV_MEMORY_NOT_REGISTERED",
    });
    await expect(listOf([0, BLOCK, 9999, 0, 1])).rejects.toMatchObject({
      code: "KV_MEMORY_NOT_REGISTERED",
    });
    const table = { memoryType: "OBJ", rows: Float64Array.from(whole(object)) } as const;
    await expect(agent.prepareRemote("somebody", table)).rejects.toMatchObject({
      code: "KV_LIST_INVALID",
    });
    await expect(agent.prepareLocal(table)).rejects.toMatchObject({ code: "KV_LIST_INVALID" });
    const [local, remote] = [await dram(), await agent.prepareRemote(agent.name, table)];
    const read = { operation: "READ", local, localIds: first, remote, remoteIds: first } as const;
    await expect(agent.transfer(read).done).rejects.toMatchObject({ code: "KV_TRANSFER_FAILED" });
    for (const list of [local, remote]) await list.close();
    await registration.close();
    object.close();
    await expect(agent.register(object)).rejects.toMatchObject({ code: "KV_MEMORY_INVALID" });
  });
});

test.skipIf(nixlMissing)("an object is refused without a backend for objects", async () => {
  const transport = nixlTransport({ backends: ["UCX"] });
  const agent = await transport.createAgent();
  await expect(agent.register(objectMemory("any", { lengthBytes: 1 }))).rejects.toMatchObject({
    code: "KV_MEMORY_INVALID",
    hint: expect.stringContaining("OBJ"),
  });
  await transport.close();
});
