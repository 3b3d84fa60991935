import { DESCRIPTOR_ROW } from "@kv/interface";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { meterTransfers } from "./transfer-meter.js";

describe("transfer meter", () => {
  it("sums the transfers of a request's blocks and forgets them", async () => {
    const network = memoryNetwork();
    let now = 0;
    const clock = { now: () => now, setTimer: () => ({ cancel() {} }) };
    const blockBytes = 64;
    const target = memoryTransport({ network, host: "d" });
    let base = 0;
    const meter = meterTransfers(target, {
      clock,
      blockAt: (address) => Math.floor((address - base) / blockBytes),
    });
    const memory = meter.transport.allocate(8 * blockBytes);
    base = memory.address;
    const agent = await meter.transport.createAgent({ name: "d0" });
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
    const local = await agent.prepareLocal(row(base));
    const peer = await agent.addRemote(await remote.localMetadata());
    const far = await agent.prepareRemote(peer, row(remoteMemory.address));
    const read = async (ids: number[]) => {
      const transfer = agent.transfer({
        operation: "READ",
        local,
        remote: far,
        localIds: Int32Array.from(ids),
        remoteIds: Int32Array.from(ids),
      });
      await transfer.done;
    };
    now = 5;
    await read([3, 4]);
    now = 9;
    await read([5]);
    await read([6]);
    expect(memory.bytes[3 * blockBytes]).toBe(7);
    const taken = meter.take([3, 4, 5], 5);
    expect(taken).toMatchObject({ lengthBytes: 3 * blockBytes, transfers: 2, descriptors: 3 });
    // From the start of the first at 5 to the end of the second, which started at 9.
    expect(taken.transferMs).toBeGreaterThanOrEqual(4);
    expect(meter.take([3, 4, 5], 0)).toMatchObject({ lengthBytes: 0, transfers: 0, transferMs: 0 });
    expect(meter.take([6], 10)).toMatchObject({ lengthBytes: 0 });
    await meter.transport.close();
    await source.close();
  });
});
