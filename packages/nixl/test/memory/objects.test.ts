import type { Agent, Memory, Transport } from "@kv/interface";
import { nixlTransport, objectMemory } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { type ObjectStore, objectBackend, startObjectStore } from "@kv/testing/nixl/object-store";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { blocksOf } from "../support/pair.js";
import { fillPattern, scattered } from "../support/pattern.js";
import { pluginMissing } from "../support/plugins.js";
import { refused } from "../support/refused.js";
import { refusesOtherStorage, storesAndLoads } from "./storage-cases.js";

const BLOCK = 65_536;
const COUNT = 24;
const LENGTH = BLOCK * COUNT;
const FIRST = scattered(1);

const missing = await pluginMissing("OBJ");

describe.skipIf(missing)(`objects of a store (${missing ?? "OBJ found"})`, () => {
  let store: ObjectStore;
  let transport: Transport;
  let agent: Agent;
  let memory: Memory;

  beforeAll(async () => {
    store = await startObjectStore();
    transport = nixlTransport({ backends: [objectBackend(store.port)] });
    agent = await transport.createAgent();
    memory = transport.allocate(LENGTH);
    await agent.register(memory);
  });
  afterAll(async () => {
    await transport?.close();
    memory?.close();
    await store?.close();
  });

  const listOf = (...tables: { rows: Float64Array }[]) =>
    agent.prepareRemote(agent.name, {
      memoryType: "OBJ",
      rows: Float64Array.from(tables.flatMap(({ rows }) => [...rows])),
    });
  const whole = (object: Memory) => blocksOf(object, object.lengthBytes, 1);

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
    await Promise.all(objects.map((object) => agent.register(object)));
    const local = await agent.prepareLocal(blocksOf(memory, BLOCK, COUNT));
    const remote = await listOf(...objects.map(whole));
    const written = await storesAndLoads(agent, memory, { local, remote }, (place) =>
      store.objects.get(`/kv/blocks/${place} of ${COUNT}`),
    );
    expect(store.objects.size).toBe(COUNT);

    // The second half of an object, into the first half of the memory.
    const place = scattered(COUNT, 7)[5] ?? 0;
    const half = {
      local: await agent.prepareLocal(blocksOf(memory, BLOCK / 2, 2 * COUNT)),
      localIds: FIRST,
      remote: await listOf(blocksOf(objects[place] ?? memory, BLOCK / 2, 2)),
      remoteIds: Int32Array.of(1),
    } as const;
    await agent.transfer({ operation: "READ", ...half }).done;
    const wanted = written.subarray(5.5 * BLOCK, 6 * BLOCK);
    expect(wanted.equals(memory.bytes.subarray(0, BLOCK / 2))).toBe(true);
    expect(() => agent.transfer({ operation: "WRITE", ...half })).toThrow(
      "WRITE replaces an object",
    );
  });

  test("an object longer than a slice is one request; rows shorter than the object are refused", async () => {
    const lengthBytes = 40 << 20;
    const large = transport.allocate(lengthBytes);
    const object = objectMemory("large", { lengthBytes });
    for (const each of [large, object]) await agent.register(each);
    const rows = Float64Array.of(...whole(large).rows, ...blocksOf(large, BLOCK, 1).rows);
    const local = await agent.prepareLocal({ memoryType: "DRAM", rows });
    const [all, part] = [await listOf(whole(object)), await listOf(blocksOf(object, BLOCK, 1))];
    const stored = () => store.objects.get("/kv/large");
    store.objects.set("/kv/large", Buffer.alloc(lengthBytes, 5));
    const read = { operation: "READ", local, localIds: FIRST, remoteIds: FIRST } as const;
    const write = { ...read, operation: "WRITE" } as const;
    expect(() => agent.transfer({ ...write, localIds: Int32Array.of(1), remote: part })).toThrow(
      "WRITE replaces an object",
    );
    expect(stored()?.length).toBe(lengthBytes);
    await agent.transfer({ ...read, remote: all }).done;
    expect(large.bytes.every((byte) => byte === 5)).toBe(true);
    fillPattern(large.bytes, 8);
    await agent.transfer({ ...write, remote: all }).done;
    expect(stored()?.equals(large.bytes)).toBe(true);
  });

  test("refuses rows outside of the object, absent objects, and objects of another agent", async () => {
    const absent = () => objectMemory("absent", { lengthBytes: BLOCK });
    await refusesOtherStorage(agent, absent());
    const object = absent();
    await agent.register(object);
    const [local, remote] = [
      await agent.prepareLocal(blocksOf(memory, BLOCK, 1)),
      await listOf(whole(object)),
    ];
    const read = { operation: "READ", local, localIds: FIRST, remote, remoteIds: FIRST } as const;
    await refused(agent.transfer(read).done, "KV_TRANSFER_FAILED");
  });
});

test.skipIf(nixlMissing)("an object is refused without a backend for objects", async () => {
  await using transport = nixlTransport({ backends: ["UCX"] });
  const agent = await transport.createAgent();
  const object = objectMemory("any", { lengthBytes: 1 });
  const { hint } = await refused(agent.register(object), "KV_MEMORY_INVALID");
  expect(hint).toContain("OBJ");
});
