import { expect, test } from "vitest";
import {
  blockLists,
  blockPair,
  type Fixture,
  fulfilled,
  introduced,
  operations,
  pattern,
  prepare,
  readOf,
  scattered,
} from "./fixture.js";

/** Descriptors as pairs: each byte arrives and no other byte changes. */
export function transferTests(fixture: Fixture): void {
  const { waitFor } = fixture;

  test("scattered indices of strided rows move exactly their bytes, in both directions", async () => {
    for (const operation of operations(fixture)) {
      const { reader, owner } = await introduced(fixture, 32_768, 2);
      // Row two has descriptors of another length; gaps lie between the descriptors of row one.
      const localRows = [
        [0, 256, 1024, 16],
        [16_384, 512, 512, 8],
      ] as const;
      const remoteRows = [
        [20_000, 512, 600, 8],
        [512, 256, 768, 20],
      ] as const;
      const local = await prepare(fixture, reader.agent, reader, ...localRows);
      const remote = await prepare(fixture, reader.agent, owner, ...remoteRows);
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
      const { done, released } = reader.agent.transfer({
        operation,
        local,
        localIds,
        remote,
        remoteIds,
      });
      // The arrays were copied, so that reusing them has no effect.
      localIds.fill(1);
      remoteIds.fill(9);
      const result = await waitFor(done);
      const isReleased = fulfilled(released);
      await Promise.resolve();
      expect(isReleased()).toBe(true);
      expect(result).toMatchObject({ lengthBytes, descriptorCount: 8 });
      expect(result.transferMs).toBeGreaterThanOrEqual(0);
      expect(result.postMs).toBeGreaterThanOrEqual(0);
      expect(Buffer.compare(reader.memory.bytes, expectedLocal)).toBe(0);
      expect(Buffer.compare(owner.memory.bytes, expectedRemote)).toBe(0);
    }
  });

  test("blocks that are adjacent on one side only are not merged", async () => {
    const { reader, local, remote } = await blockPair(fixture, 16_384, 1024, 6);
    const inOrder = Int32Array.of(0, 1, 2, 3, 4, 5);
    const mixed = Int32Array.of(9, 10, 3, 2, 15, 0);
    for (const [localIds, remoteIds] of [
      [inOrder, mixed],
      [mixed, inOrder],
    ] as const) {
      reader.memory.bytes.fill(0);
      const { done } = reader.agent.transfer({
        operation: "READ",
        local,
        localIds,
        remote,
        remoteIds,
      });
      expect((await waitFor(done)).lengthBytes).toBe(6 * 1024);
      const expected = new Uint8Array(16_384);
      localIds.forEach((localId, index) => {
        const from = (remoteIds[index] ?? 0) * 1024;
        expected.set(pattern(16_384, 7).subarray(from, from + 1024), localId * 1024);
      });
      expect(Buffer.compare(reader.memory.bytes, expected)).toBe(0);
    }
  });

  test("a big transfer of many scattered descriptors arrives complete, in both directions", async () => {
    const lengthBytes = fixture.options.bigLengthBytes ?? 32 << 20;
    const { reader, owner, local, remote } = await blockPair(fixture, lengthBytes, 4096, 4);
    const count = lengthBytes / 4096;
    const localIds = scattered(count, 2741);
    const remoteIds = scattered(count, 911);
    for (const operation of operations(fixture)) {
      reader.memory.bytes.set(pattern(lengthBytes, 4));
      owner.memory.bytes.set(pattern(lengthBytes, 5));
      const { done } = reader.agent.transfer({ operation, local, localIds, remote, remoteIds });
      expect(await waitFor(done)).toMatchObject({ lengthBytes, descriptorCount: count });
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

  test("concurrent transfers with several peers each move their own bytes", async () => {
    const reader = await fixture.side(64 * 1024, 9);
    const lists: Awaited<ReturnType<typeof blockLists>>[] = [];
    for (const seed of [10, 11, 12])
      lists.push(await blockLists(fixture, reader, await fixture.side(64 * 1024, seed), 1024));
    const moves = Array.from({ length: 48 }, (_, index) => {
      const list = lists[index % 3] as (typeof lists)[number];
      const remoteId = (index * 5) % 64;
      const [localIds, remoteIds] = [Int32Array.of(index), Int32Array.of(remoteId)];
      return {
        ownerSeed: 10 + (index % 3),
        localId: index,
        remoteId,
        done: reader.agent.transfer({ operation: "READ", ...list, localIds, remoteIds }).done,
      };
    });
    for (const { ownerSeed, localId, remoteId, done } of moves) {
      expect((await waitFor(done)).lengthBytes).toBe(1024);
      const expected = pattern(64 * 1024, ownerSeed).subarray(
        remoteId * 1024,
        remoteId * 1024 + 1024,
      );
      expect(
        Buffer.compare(
          reader.memory.bytes.subarray(localId * 1024, localId * 1024 + 1024),
          expected,
        ),
      ).toBe(0);
    }
  });

  test("telemetry counts transfers, bytes and notifications", async () => {
    const { reader, local, remote } = await blockPair(fixture, 8192, 1024);
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
    const request = readOf({ local, remote }, Int32Array.of(0, 1, 2));
    for (let round = 0; round < 4; round++) await waitFor(reader.agent.transfer(request).done);
    const aborted = reader.agent.transfer({ ...request, signal: AbortSignal.abort() });
    await waitFor(aborted.released);
    await aborted.done.catch(() => {});
    expect(reader.agent.telemetry()).toMatchObject({
      transfersDone: 4,
      transfersFailed: 1,
      transfersInFlight: 0,
      bytesTransferred: 4 * 3 * 1024,
    });
  });
}
