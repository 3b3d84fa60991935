import type { Agent, Memory, PreparedList } from "@kv/interface";
import { expect } from "vitest";
import { blocksOf } from "../support/pair.js";
import { fillPattern, scattered } from "../support/pattern.js";
import { refused } from "../support/refused.js";

/**
 * Stores the blocks of a memory in scattered places, and loads them again. `stored` is what the
 * storage then has in each place. Returns the bytes.
 */
export async function storesAndLoads(
  agent: Agent,
  memory: Memory,
  { local, remote }: { local: PreparedList; remote: PreparedList },
  stored: (place: number) => Buffer | undefined | Promise<Buffer | undefined>,
): Promise<Buffer> {
  const { count } = local;
  const places = scattered(count, 7);
  fillPattern(memory.bytes, 11);
  const written = Buffer.from(memory.bytes);
  const write = {
    operation: "WRITE",
    local,
    remote,
    localIds: scattered(count),
    remoteIds: places,
  } as const;
  expect((await agent.transfer(write).done).lengthBytes).toBe(memory.lengthBytes);
  const block = memory.lengthBytes / count;
  for (const [index, place] of places.entries()) {
    const wanted = written.subarray(index * block, (index + 1) * block);
    expect((await stored(place))?.equals(wanted)).toBe(true);
  }
  memory.bytes.fill(0);
  await agent.transfer({ ...write, operation: "READ" }).done;
  expect(written.equals(memory.bytes)).toBe(true);

  const notification = Buffer.from("x");
  expect(() => agent.transfer({ ...write, notification })).toThrow("no peer to notify");
  return written;
}

/** Lists of other storage than what is registered are refused, and closed storage is. */
export async function refusesOtherStorage(agent: Agent, storage: Memory): Promise<void> {
  const registration = await agent.register(storage);
  const table = (wrong = {}) => blocksOf({ ...storage, ...wrong }, storage.lengthBytes, 1);
  for (const wrong of [{ address: 1 }, { deviceId: 9999 }])
    await refused(agent.prepareRemote(agent.name, table(wrong)), "KV_MEMORY_NOT_REGISTERED");
  await refused(agent.prepareRemote("somebody", table()), "KV_LIST_INVALID");
  await refused(agent.prepareLocal(table()), "KV_LIST_INVALID");
  // A device whose id equals the storage's.
  const device = table({ memoryType: "VRAM", address: 4096 });
  await refused(agent.prepareLocal(device), "KV_MEMORY_NOT_REGISTERED");

  const list = await agent.prepareRemote(agent.name, table());
  await refused(registration.close(), "KV_MEMORY_IN_USE");
  expect(() => storage.close()).toThrow("registrations");
  await list.close();
  await registration.close();
  storage.close();
  storage.close();
  await refused(agent.register(storage), "KV_MEMORY_INVALID");
}
