import { DESCRIPTOR_ROW } from "@kv/interface";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { expect, it } from "vitest";
import { KvPool } from "../engine/cache/kv-pool.js";
import { RequestRecord } from "../engine/request.js";
import { KvJournal } from "./kv-journal.js";

it("sums the transfers of a request's blocks since its admission, and forgets them", async () => {
  const network = memoryNetwork();
  let now = 0;
  const clock = { now: () => now, setTimer: () => ({ cancel() {} }) };
  const target = memoryTransport({ network, host: "d" });
  const journal = new KvJournal(target, clock);
  const geometry = { layers: 1, kvHeads: 1, headDim: 8 };
  const blockBytes = 2 * 8 * 4;
  const pool = new KvPool({ transport: target, geometry, numBlocks: 8, blockSize: 1, tp: 1 });
  const [caches] = pool.caches;
  const memory = caches?.regions[0]?.memory;
  if (caches === undefined || memory === undefined) throw new Error("no caches");
  journal.addCaches(caches);
  const agent = await journal.transport.createAgent({ name: "d0" });
  await agent.register(memory);
  const source = memoryTransport({ network, host: "p" });
  const remote = await source.createAgent({ name: "p0" });
  const remoteMemory = source.allocate(8 * blockBytes);
  await remote.register(remoteMemory);
  remoteMemory.bytes.fill(7);

  const row = (address: number) => {
    const rows = new Float64Array(DESCRIPTOR_ROW);
    rows.set([address, blockBytes, 0, blockBytes, 8]);
    return { memoryType: "DRAM" as const, rows };
  };
  const local = await agent.prepareLocal(row(memory.address));
  const peer = await agent.addRemote(await remote.localMetadata());
  const far = await agent.prepareRemote(peer, row(remoteMemory.address));
  const read = async (ids: number[]) => {
    const [localIds, remoteIds] = [Int32Array.from(ids), Int32Array.from(ids)];
    const order = { operation: "READ", local, remote: far, localIds, remoteIds } as const;
    await agent.transfer(order).done;
  };
  now = 5;
  await read([3, 4]);
  now = 9;
  await read([5]);
  await read([6]);
  expect(memory.bytes[3 * blockBytes]).toBe(7);

  const hooks = journal.hooks(pool, false);
  const taken = async (blockIds: number[], admittedMs: number) => {
    const request = { requestId: "r", promptTokens: [1], maxTokens: 1 };
    const options = { blockSize: 1, uniform: Math.random, prefixCaching: false };
    const record = Object.assign(new RequestRecord(request, options), { blockIds, admittedMs });
    await hooks.afterReceive?.(record, blockIds.length);
    return journal.records.at(-1)?.transfer;
  };
  const both = await taken([3, 4, 5], 5);
  expect(both).toMatchObject({ length_bytes: 3 * blockBytes, transfers: 2, descriptors: 3 });
  // From the start of the first at 5 to the end of the second, which started at 9.
  expect(both?.transfer_ms).toBeGreaterThanOrEqual(4);
  const nothing = { length_bytes: 0, transfers: 0, transfer_ms: 0 };
  expect(await taken([3, 4, 5], 0)).toMatchObject(nothing);
  expect(await taken([6], 10)).toMatchObject(nothing);
  await journal.transport.close();
  await source.close();
});
