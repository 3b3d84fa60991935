import { expect, test } from "vitest";
import {
  blockLists,
  blockPair,
  expectBytes,
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
      const expand = (rows: readonly (readonly [number, number, number, number])[]) =>
        rows.flatMap(([offset, length, stride, count]) =>
          Array.from({ length: count }, (_, index) => [offset + index * stride, length] as const),
        );
      const [localPlaces, remotePlaces] = [expand(localRows), expand(remoteRows)];
      const expectedLocal = pattern(32_768, 2);
      const expectedRemote = pattern(32_768, 3);
      const [from, to] =
        operation === "READ"
          ? [expectedRemote.slice(), expectedLocal]
          : [expectedLocal.slice(), expectedRemote];
      let lengthBytes = 0;
      localIds.forEach((localId, index) => {
        const [localAt = 0, length = 0] = localPlaces[localId] ?? [];
        const [remoteAt = 0] = remotePlaces[remoteIds[index] ?? -1] ?? [];
        const [fromAt, toAt] = operation === "READ" ? [remoteAt, localAt] : [localAt, remoteAt];
        to.set(from.subarray(fromAt, fromAt + length), toAt);
        lengthBytes += length;
      });
      const request = { operation, local, localIds, remote, remoteIds };
      const { done, released } = reader.agent.transfer(request);
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
      expectBytes(reader.memory.bytes, expectedLocal);
      expectBytes(owner.memory.bytes, expectedRemote);
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
      const request = { ...readOf({ local, remote }, localIds), remoteIds };
      expect((await waitFor(reader.agent.transfer(request).done)).lengthBytes).toBe(6 * 1024);
      const expected = new Uint8Array(16_384);
      localIds.forEach((localId, index) => {
        const from = (remoteIds[index] ?? 0) * 1024;
        expected.set(pattern(16_384, 7).subarray(from, from + 1024), localId * 1024);
      });
      expectBytes(reader.memory.bytes, expected);
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
      expectBytes(target, expected);
    }
  });

  test("concurrent transfers with several peers each move their own bytes", async () => {
    const reader = await fixture.side(64 * 1024, 9);
    const lists: Awaited<ReturnType<typeof blockLists>>[] = [];
    for (const seed of [10, 11, 12])
      lists.push(await blockLists(fixture, reader, await fixture.side(64 * 1024, seed), 1024));
    const moves = Array.from({ length: 48 }, (_, index) => {
      const list = lists[index % 3] as (typeof lists)[number];
      const remoteIds = Int32Array.of((index * 5) % 64);
      const request = { ...readOf(list, Int32Array.of(index)), remoteIds };
      return reader.agent.transfer(request).done;
    });
    const block = (all: Uint8Array, id: number) => all.subarray(id * 1024, (id + 1) * 1024);
    for (const [index, done] of moves.entries()) {
      expect((await waitFor(done)).lengthBytes).toBe(1024);
      const owned = pattern(64 * 1024, 10 + (index % 3));
      expectBytes(block(reader.memory.bytes, index), block(owned, (index * 5) % 64));
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
