import {
  type DescriptorPairs,
  type DescriptorRuns,
  descriptorPairs,
  type Memory,
  type TransferRequest,
} from "@kv/interface";
import { expect, test } from "vitest";
import { expectThrown } from "../refusal.js";
import { blockLists, type Ground, nextOf, pattern, rowsIn, scattered } from "./ground.js";

export function movingTests(ground: Ground): void {
  const { settle } = ground;
  const operations = (): TransferRequest["operation"][] => {
    const { read, write } = ground.transport().capabilities;
    return [...(read ? (["READ"] as const) : []), ...(write ? (["WRITE"] as const) : [])];
  };

  test("scattered ids of strided rows move exactly their bytes, both ways, and no others", async () => {
    for (const operation of operations()) {
      const reader = await ground.side(32_768, 2);
      const owner = await ground.side(32_768, 3);
      await ground.introduce(reader.agent, owner.agent);
      // Row two has descriptors of another length; gaps lie between the descriptors of row one.
      const localRows = [
        [0, 256, 1024, 16],
        [16_384, 512, 512, 8],
      ] as const;
      const remoteRows = [
        [20_000, 512, 600, 8],
        [512, 256, 768, 20],
      ] as const;
      const local = await settle(
        reader.agent.prepareLocal({ memoryType: "DRAM", rows: rowsIn(reader.memory, ...localRows) }),
      );
      const remote = await settle(
        reader.agent.prepareRemote(owner.agent.name, {
          memoryType: "DRAM",
          rows: rowsIn(owner.memory, ...remoteRows),
        }),
      );
      const localIds = Int32Array.of(3, 0, 23, 15, 16, 4, 5, 6);
      const remoteIds = Int32Array.of(8, 27, 0, 12, 7, 9, 10, 11);
      const addressOf = (
        rows: readonly (readonly [number, number, number, number])[],
        id: number,
      ): [number, number] => {
        let left = id;
        for (const [offset, length, stride, count] of rows) {
          if (left < count) return [offset + left * stride, length];
          left -= count;
        }
        throw new Error("the test names a descriptor that its rows lack");
      };
      const expectedLocal = pattern(32_768, 2);
      const expectedRemote = pattern(32_768, 3);
      const [from, to] =
        operation === "READ"
          ? [expectedRemote.slice(), expectedLocal]
          : [expectedLocal.slice(), expectedRemote];
      let lengthBytes = 0;
      localIds.forEach((localId, index) => {
        const [localAt, length] = addressOf(localRows, localId);
        const [remoteAt] = addressOf(remoteRows, remoteIds[index] ?? -1);
        const [fromAt, toAt] = operation === "READ" ? [remoteAt, localAt] : [localAt, remoteAt];
        to.set(from.subarray(fromAt, fromAt + length), toAt);
        lengthBytes += length;
      });
      const { done, released } = reader.agent.transfer({ operation, local, localIds, remote, remoteIds });
      // Both were copied: whoever reuses the arrays changes nothing.
      localIds.fill(1);
      remoteIds.fill(9);
      const result = await settle(done);
      let wasReleased = false;
      void released.then(() => {
        wasReleased = true;
      });
      await Promise.resolve();
      expect(wasReleased).toBe(true);
      expect(result).toMatchObject({ lengthBytes, descriptorCount: 8 });
      expect(result.transferMs).toBeGreaterThanOrEqual(0);
      expect(result.postMs).toBeGreaterThanOrEqual(0);
      expect(Buffer.compare(reader.memory.bytes, expectedLocal)).toBe(0);
      expect(Buffer.compare(owner.memory.bytes, expectedRemote)).toBe(0);
    }
  });

  test("blocks that are neighbours on one side only are not taken for a run", async () => {
    const reader = await ground.side(16_384, 6);
    const owner = await ground.side(16_384, 7);
    const { local, remote } = await blockLists(ground, reader, owner, 1024);
    const inOrder = Int32Array.of(0, 1, 2, 3, 4, 5);
    const mixed = Int32Array.of(9, 10, 3, 2, 15, 0);
    for (const [localIds, remoteIds] of [
      [inOrder, mixed],
      [mixed, inOrder],
    ] as const) {
      reader.memory.bytes.fill(0);
      const { done } = reader.agent.transfer({ operation: "READ", local, localIds, remote, remoteIds });
      expect((await settle(done)).lengthBytes).toBe(6 * 1024);
      const expected = new Uint8Array(16_384);
      localIds.forEach((localId, index) => {
        const from = (remoteIds[index] ?? 0) * 1024;
        expected.set(pattern(16_384, 7).subarray(from, from + 1024), localId * 1024);
      });
      expect(Buffer.compare(reader.memory.bytes, expected)).toBe(0);
    }
  });

  test("a transfer whose arguments cannot be right is thrown back at once, and moves nothing", async () => {
    const reader = await ground.side(8192, 0);
    const owner = await ground.side(8192, 1);
    const { local, remote } = await blockLists(ground, reader, owner, 1024);
    const big = await settle(
      reader.agent.prepareLocal({ memoryType: "DRAM", rows: rowsIn(reader.memory, [0, 2048, 2048, 4]) }),
    );
    const right = {
      operation: "READ",
      local,
      localIds: Int32Array.of(0, 1),
      remote,
      remoteIds: Int32Array.of(2, 3),
    } as const;
    const wrong: Partial<Record<keyof TransferRequest, unknown>>[] = [
      { localIds: Int32Array.of(0) },
      { remoteIds: Int32Array.of(2, 3, 4) },
      { localIds: Int32Array.of(), remoteIds: Int32Array.of() },
      { localIds: Int32Array.of(0, 8) },
      { remoteIds: Int32Array.of(2, 8) },
      { localIds: Int32Array.of(-1, 0) },
      { remoteIds: Int32Array.of(2, -2147483648) },
      { local: big },
      { local: remote, remote: local },
      { remote: local },
      { operation: "COPY" },
      { localIds: [0, 1] },
      { timeoutMs: Number.NaN },
      { timeoutMs: -1 },
      { notification: "text" },
    ];
    for (const change of wrong) {
      const request = { ...right, ...change } as unknown as TransferRequest;
      expectThrown(() => reader.agent.transfer(request), "KV_TRANSFER_INVALID", "KV_NOTIFICATION_INVALID");
    }
    await settle(remote.close());
    expectThrown(() => reader.agent.transfer(right), "KV_LIST_CLOSED");
    expect(reader.agent.telemetry()).toMatchObject({ transfersPosted: 0, transfersInFlight: 0 });
    expect(Buffer.compare(reader.memory.bytes, pattern(8192, 0))).toBe(0);
  });

  test("runs move what the same pairs one by one would: of strided rows, across rows, of different lengths, both ways", async () => {
    for (const operation of operations()) {
      const reader = await ground.side(32_768, 2);
      const owner = await ground.side(32_768, 3);
      await ground.introduce(reader.agent, owner.agent);
      // Neighbours in memory; then gaps between descriptors; then another length. The remote's rows end at other indices.
      const rows = (memory: Memory, ...all: Parameters<typeof rowsIn>[1][]) => ({
        memoryType: "DRAM" as const,
        rows: rowsIn(memory, ...all),
      });
      const localTable = rows(reader.memory, [0, 256, 256, 16], [8192, 256, 512, 8], [16_384, 512, 512, 8]);
      const remoteTable = rows(
        owner.memory,
        [1024, 256, 256, 10],
        [8192, 256, 1024, 14],
        [24_576, 512, 512, 9],
      );
      const local = await settle(reader.agent.prepareLocal(localTable));
      const remote = await settle(reader.agent.prepareRemote(owner.agent.name, remoteTable));
      const runs = Int32Array.of(2, 1, 20, 26, 25, 5, 0, 23, 1, 31, 32, 1);
      const move = (spelling: DescriptorPairs | DescriptorRuns) =>
        settle(reader.agent.transfer({ operation, local, remote, ...spelling }).done);
      const after = async (spelling: DescriptorPairs | DescriptorRuns) => {
        reader.memory.bytes.set(pattern(32_768, 2));
        owner.memory.bytes.set(pattern(32_768, 3));
        expect(await move(spelling)).toMatchObject({
          descriptorCount: 27,
          lengthBytes: 21 * 256 + 6 * 512,
        });
        return [reader.memory.bytes.slice(), owner.memory.bytes.slice()] as const;
      };
      const expected = await after(descriptorPairs({ runs }));
      const moved = await after({ runs });
      for (const [side, bytes] of moved.entries()) {
        expect(Buffer.compare(bytes, expected[side] as Uint8Array)).toBe(0);
      }
      const [untouched, touched] = operation === "READ" ? [1, 0] : [0, 1];
      expect(Buffer.compare(moved[untouched] as Uint8Array, pattern(32_768, untouched + 2))).toBe(0);
      expect(Buffer.compare(moved[touched] as Uint8Array, pattern(32_768, touched + 2))).not.toBe(0);
    }
  });

  test("runs at offsets move what the same pairs one by one would", async () => {
    const reader = await ground.side(32_768, 2);
    const owner = await ground.side(32_768, 3);
    const { local, remote } = await blockLists(ground, reader, owner, 512);
    // Alone, side by side, and by runs so long that a transport may take another road.
    for (const spelling of [
      { runs: Int32Array.of(1, 4, 1, 3, 0, 2), offsets: Int32Array.of(0, 0, 5, 20, 20, 7) },
      { runs: Int32Array.of(0, 2, 20), offsets: Int32Array.of(40, 1) },
    ]) {
      const after = async (descriptors: DescriptorPairs | DescriptorRuns) => {
        reader.memory.bytes.set(pattern(32_768, 2));
        await settle(reader.agent.transfer({ operation: "READ", local, remote, ...descriptors }).done);
        return reader.memory.bytes.slice();
      };
      const pairs = descriptorPairs(spelling);
      const expected = await after(pairs);
      expect(Buffer.compare(expected, pattern(32_768, 2))).not.toBe(0);
      expect(Buffer.compare(await after(spelling), expected)).toBe(0);
    }
  });

  test("offsets that take a run out of its list, or are no rows, or come with ids, are refused", async () => {
    const reader = await ground.side(16_384, 2);
    const owner = await ground.side(16_384, 3);
    const { local, remote } = await blockLists(ground, reader, owner, 1024);
    const runs = Int32Array.of(0, 2, 3, 4, 0, 1);
    const refused = [
      { runs, offsets: Int32Array.of(0, 0, 12, 0) },
      { runs, offsets: Int32Array.of(0, 12) },
      { runs, offsets: Int32Array.of(-1, 0) },
      { runs, offsets: Int32Array.of(0, -1) },
      { runs, offsets: Int32Array.of(2 ** 31 - 1, 0) },
      { runs, offsets: Int32Array.of(0) },
      { runs, offsets: new Int32Array(0) },
      { runs, offsets: [0, 0] as unknown as Int32Array },
      {
        localIds: Int32Array.of(0),
        remoteIds: Int32Array.of(0),
        offsets: Int32Array.of(0, 0) as unknown as undefined,
      },
    ];
    for (const descriptors of refused) {
      expect(() => reader.agent.transfer({ operation: "READ", local, remote, ...descriptors })).toThrow(
        expect.objectContaining({ code: "KV_TRANSFER_INVALID" }),
      );
    }
  });

  test("runs are copied at the call, and bring their notification after the last byte", async () => {
    const reader = await ground.side(16_384, 0);
    const owner = await ground.side(16_384, 7);
    const { local, remote } = await blockLists(ground, reader, owner, 1024);
    const inbox = owner.agent.notifications();
    const runs = Int32Array.of(8, 0, 8);
    const { done } = reader.agent.transfer({
      operation: "READ",
      local,
      remote,
      runs,
      notification: new TextEncoder().encode("run"),
    });
    runs.fill(0);
    await settle(done);
    const { payload } = await nextOf(ground, inbox);
    expect(new TextDecoder().decode(payload)).toBe("run");
    const expected = pattern(16_384, 0);
    expected.set(pattern(16_384, 7).subarray(0, 8192), 8192);
    expect(Buffer.compare(reader.memory.bytes, expected)).toBe(0);
    await inbox.return?.();
  });

  test("runs that cannot be right are thrown back at once, and move nothing", async () => {
    const reader = await ground.side(8192, 0);
    const owner = await ground.side(8192, 1);
    const { local, remote } = await blockLists(ground, reader, owner, 1024);
    const mixed = await settle(
      reader.agent.prepareLocal({
        memoryType: "DRAM",
        rows: rowsIn(reader.memory, [0, 1024, 1024, 4], [4096, 512, 512, 4]),
      }),
    );
    const wrong: Record<string, unknown>[] = [
      { runs: Int32Array.of() },
      { runs: Int32Array.of(0, 0) },
      { runs: Int32Array.of(0, 0, 0) },
      { runs: Int32Array.of(0, 0, -1) },
      { runs: Int32Array.of(-1, 0, 1) },
      { runs: Int32Array.of(0, -1, 2) },
      { runs: Int32Array.of(0, 0, 9) },
      { runs: Int32Array.of(7, 0, 2) },
      { runs: Int32Array.of(0, 7, 2) },
      { runs: Int32Array.of(0, 0, 1, 2, 7, 2147483647) },
      { runs: [0, 0, 1] },
      { runs: Int32Array.of(0, 0, 1), localIds: Int32Array.of(0), remoteIds: Int32Array.of(0) },
      { runs: Int32Array.of(0, 0, 5), local: mixed },
      {},
    ];
    for (const change of wrong) {
      const request = { operation: "READ", local, remote, ...change } as unknown as TransferRequest;
      expectThrown(() => reader.agent.transfer(request), "KV_TRANSFER_INVALID");
    }
    expect(reader.agent.telemetry()).toMatchObject({ transfersPosted: 0, transfersInFlight: 0 });
    expect(Buffer.compare(reader.memory.bytes, pattern(8192, 0))).toBe(0);
  });

  test("lists of another agent are refused", async () => {
    const reader = await ground.side(8192, 0);
    const other = await ground.side(8192, 0);
    const owner = await ground.side(8192, 1);
    const own = await blockLists(ground, reader, owner, 1024);
    const others = await blockLists(ground, other, owner, 1024);
    const ids = Int32Array.of(0);
    for (const lists of [
      { ...own, local: others.local },
      { ...own, remote: others.remote },
    ]) {
      const request = { operation: "READ", ...lists, localIds: ids, remoteIds: ids } as const;
      expectThrown(() => reader.agent.transfer(request), "KV_TRANSFER_INVALID");
    }
  });

  test("a big transfer in many scattered descriptors arrives whole, both ways", async () => {
    const lengthBytes = ground.options.bigLengthBytes ?? 32 << 20;
    const reader = await ground.side(lengthBytes, 4);
    const owner = await ground.side(lengthBytes, 5);
    const { local, remote } = await blockLists(ground, reader, owner, 4096);
    const count = lengthBytes / 4096;
    const localIds = scattered(count, 2741);
    const remoteIds = scattered(count, 911);
    for (const operation of operations()) {
      reader.memory.bytes.set(pattern(lengthBytes, 4));
      owner.memory.bytes.set(pattern(lengthBytes, 5));
      const { done } = reader.agent.transfer({ operation, local, localIds, remote, remoteIds });
      expect(await settle(done)).toMatchObject({ lengthBytes, descriptorCount: count });
      const source = pattern(lengthBytes, operation === "READ" ? 5 : 4);
      const target = operation === "READ" ? reader.memory.bytes : owner.memory.bytes;
      const [fromIds, toIds] = operation === "READ" ? [remoteIds, localIds] : [localIds, remoteIds];
      const expected = new Uint8Array(lengthBytes);
      for (let index = 0; index < count; index++) {
        const from = (fromIds[index] as number) * 4096;
        expected.set(source.subarray(from, from + 4096), (toIds[index] as number) * 4096);
      }
      expect(Buffer.compare(target, expected)).toBe(0);
    }
  });

  test("many transfers at once, of several peers, each bring their own bytes", async () => {
    const reader = await ground.side(64 * 1024, 9);
    const owners = [
      await ground.side(64 * 1024, 10),
      await ground.side(64 * 1024, 11),
      await ground.side(64 * 1024, 12),
    ];
    const lists: Awaited<ReturnType<typeof blockLists>>[] = [];
    for (const owner of owners) lists.push(await blockLists(ground, reader, owner, 1024));
    const moves = Array.from({ length: 48 }, (_, index) => {
      const { local, remote } = lists[index % 3] as (typeof lists)[number];
      const remoteId = (index * 5) % 64;
      return {
        ownerSeed: 10 + (index % 3),
        localId: index,
        remoteId,
        done: reader.agent.transfer({
          operation: "READ",
          local,
          localIds: Int32Array.of(index),
          remote,
          remoteIds: Int32Array.of(remoteId),
        }).done,
      };
    });
    for (const { ownerSeed, localId, remoteId, done } of moves) {
      expect((await settle(done)).lengthBytes).toBe(1024);
      const expected = pattern(64 * 1024, ownerSeed).subarray(remoteId * 1024, remoteId * 1024 + 1024);
      expect(
        Buffer.compare(reader.memory.bytes.subarray(localId * 1024, localId * 1024 + 1024), expected),
      ).toBe(0);
    }
  });

  test("telemetry counts what was done", async () => {
    const reader = await ground.side(8192, 0);
    const owner = await ground.side(8192, 1);
    const { local, remote } = await blockLists(ground, reader, owner, 1024);
    expect(reader.agent.telemetry()).toEqual({
      transfersPosted: 0,
      transfersDone: 0,
      transfersFailed: 0,
      transfersInFlight: 0,
      bytesTransferred: 0,
      notificationsSent: 0,
      notificationsReceived: 0,
      registrations: 1,
      preparedLists: 2,
      remotes: 1,
    });
    const ids = Int32Array.of(0, 1, 2);
    const request = { operation: "READ", local, localIds: ids, remote, remoteIds: ids } as const;
    for (let round = 0; round < 4; round++) await settle(reader.agent.transfer(request).done);
    const aborted = reader.agent.transfer({ ...request, signal: AbortSignal.abort() });
    await settle(aborted.released);
    await aborted.done.catch(() => {});
    expect(reader.agent.telemetry()).toMatchObject({
      transfersDone: 4,
      transfersFailed: 1,
      transfersInFlight: 0,
      bytesTransferred: 4 * 3 * 1024,
    });
  });
}
