import type { DescriptorTable } from "@kv/interface";
import { expect, test } from "vitest";
import { expectError, expectThrown } from "../expect-error.js";
import { expectBytes, type Fixture, fulfilled, idsBelow, readOf, rowsIn } from "./fixture.js";

export function preparedListTests(fixture: Fixture): void {
  const { waitFor, rejects } = fixture;

  test("a list counts its strided rows expanded and has the name of the owner", async () => {
    const { reader, owner } = await fixture.introduced(65_536);
    const rows = [
      [0, 256, 1024, 8],
      [8192, 100, 100, 1],
      [16_384, 512, 512, 16],
    ] as const;
    const local = await fixture.prepare(reader.agent, reader, ...rows);
    const remote = await fixture.prepare(reader.agent, owner, ...rows);
    expect(local).toMatchObject({ count: 25, remote: undefined, memoryType: "DRAM" });
    expect(remote).toMatchObject({ count: 25, remote: owner.agent.name, memoryType: "DRAM" });
    expect(reader.agent.telemetry().preparedLists).toBe(2);
  });

  test("rows are copied, or taken over with takeRows, and later changes to them have no effect", async () => {
    const { reader, owner } = await fixture.introduced(8192);
    const tables = [reader, owner].map(({ memory }) => ({
      memoryType: "DRAM" as const,
      rows: rowsIn(memory, [1024, 512, 512, 2]),
      takeRows: true,
    })) as [DescriptorTable, DescriptorTable];
    const copied = rowsIn(owner.memory, [4096, 512, 512, 2]);
    const prepared = Promise.all([
      reader.agent.prepareLocal(tables[0]),
      reader.agent.prepareRemote(owner.agent.name, tables[1]),
      reader.agent.prepareRemote(owner.agent.name, { memoryType: "DRAM", rows: copied }),
    ]);
    expect(tables.map(({ rows }) => rows.length)).toEqual([0, 0]);
    expect(copied).toHaveLength(5);
    copied.fill(0);
    const [local, taken, other] = await waitFor(prepared);
    expect([local.count, taken.count, other.count]).toEqual([2, 2, 2]);
    for (const [remote, from] of [
      [taken, 1024],
      [other, 4096],
    ] as const) {
      await waitFor(reader.agent.transfer(readOf({ local, remote }, Int32Array.of(0, 1))).done);
      expect(
        Buffer.compare(
          reader.memory.bytes.slice(1024, 2048),
          owner.memory.bytes.slice(from, from + 1024),
        ),
      ).toBe(0);
    }
  });

  test("takeRows rejects buffers that cannot be detached, and invalid rows", async () => {
    const { agent, memory } = await fixture.side(8192, 0);
    const shared = new Float64Array(new SharedArrayBuffer(40));
    shared.set(rowsIn(memory, [0, 512, 512, 16]));
    const spent = rowsIn(memory, [0, 512, 512, 16]);
    structuredClone(spent, { transfer: [spent.buffer as ArrayBuffer] });
    for (const rows of [shared, spent, Float64Array.of(1, 2, 3)]) {
      await rejects(
        () => agent.prepareLocal({ memoryType: "DRAM", rows, takeRows: true }),
        "KV_LIST_INVALID",
      );
    }
    expect(agent.telemetry().preparedLists).toBe(0);
  });

  test("invalid rows are rejected", async () => {
    const { agent, memory } = await fixture.side(8192, 0);
    const at = memory.address;
    const wrong = [
      [],
      [at, 16, 0, 16],
      [at, 16, 0, 16, 1, 9],
      [at, 0, 0, 16, 1],
      [at, 16, 0, 16, 0],
      [at, -16, 0, 16, 1],
      [at, 16.5, 0, 16, 1],
      [at, 16, 0, 16, -1],
      [at, 16, 0, 16, 1.5],
      [at, 16, 0, -16, 2],
      [Number.NaN, 16, 0, 16, 1],
      [at, Number.NaN, 0, 16, 1],
      [at, 16, 0, Number.POSITIVE_INFINITY, 2],
      [2 ** 60, 16, 0, 16, 1],
    ];
    for (const rows of wrong) {
      const table = { memoryType: "DRAM" as const, rows: Float64Array.from(rows) };
      await rejects(() => agent.prepareLocal(table), "KV_LIST_INVALID", "KV_MEMORY_NOT_REGISTERED");
    }
    expect(agent.telemetry().preparedLists).toBe(0);
  });

  test("rows outside registered memory are rejected, also when they exceed it by one byte or one stride", async () => {
    const { reader, owner } = await fixture.introduced(8192);
    const elsewhere = fixture.memory(8192);
    const beyond = [
      [0, 8193, 8193, 1],
      [8191, 2, 2, 1],
      [0, 1024, 1024, 9],
      [0, 16, 4096, 3],
      [-16, 16, 16, 1],
    ] as const;
    for (const side of [reader, owner]) {
      for (const [memory, row] of [
        ...beyond.map((row) => [side.memory, row] as const),
        [elsewhere, [0, 16, 16, 1]] as const,
      ]) {
        await expectError(
          () => fixture.prepare(reader.agent, { ...side, memory }, row),
          "KV_MEMORY_NOT_REGISTERED",
          "KV_LIST_INVALID",
        );
      }
    }
    expect(reader.agent.telemetry().preparedLists).toBe(0);
  });

  test("a registration cannot close while a prepared list refers to its memory", async () => {
    const { agent, memory, registration } = await fixture.side(8192, 0);
    const list = await fixture.prepare(agent, { agent, memory }, [0, 1024, 1024, 8]);
    await rejects(() => registration.close(), "KV_MEMORY_IN_USE");
    expectThrown(() => memory.close(), "KV_MEMORY_IN_USE");
    await waitFor(list.close());
    await waitFor(list.close());
    await waitFor(registration.close());
    expect(agent.telemetry()).toMatchObject({ preparedLists: 0, registrations: 0 });
    await expectError(
      () => fixture.prepare(agent, { agent, memory }, [0, 1024, 1024, 8]),
      "KV_MEMORY_NOT_REGISTERED",
    );
  });

  test("closing a list waits for its transfers and rejects new ones", async () => {
    const { reader, owner, local, remote } = await fixture.blockPair(4 << 20, 4096);
    const request = readOf({ local, remote }, idsBelow(1024));
    const { done, released } = reader.agent.transfer(request);
    const wasReleased = fulfilled(released);
    const closing = [local.close(), remote.close()];
    expectThrown(() => reader.agent.transfer(request), "KV_LIST_CLOSED");
    await waitFor(Promise.all(closing));
    expect(wasReleased()).toBe(true);
    expect((await waitFor(done)).lengthBytes).toBe(4 << 20);
    expectBytes(reader.memory.bytes, owner.memory.bytes);
  });
}
