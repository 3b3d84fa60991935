import {
  type DescriptorPairs,
  type DescriptorRuns,
  descriptorPairs,
  type PreparedList,
  type TransferRequest,
} from "@kv/interface";
import { expect, test } from "vitest";
import { expectThrown } from "../expect-error.js";
import {
  bytes,
  expectBytes,
  type Fixture,
  fulfilled,
  pattern,
  readOf,
  scattered,
} from "./fixture.js";

/** Each byte arrives and no other byte changes. */
export function transferTests(fixture: Fixture): void {
  const { waitFor } = fixture;

  test("scattered indices of strided rows move exactly their bytes, in both directions", async () => {
    for (const operation of fixture.operations) {
      const { reader, owner } = await fixture.introduced(32_768, 2);
      // Row two has another descriptor length; row one has gaps.
      const localRows = [
        [0, 256, 1024, 16],
        [16_384, 512, 512, 8],
      ] as const;
      const remoteRows = [
        [20_000, 512, 600, 8],
        [512, 256, 768, 20],
      ] as const;
      const local = await fixture.prepare(reader.agent, reader, ...localRows);
      const remote = await fixture.prepare(reader.agent, owner, ...remoteRows);
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
      // The arrays were copied, so they may be reused.
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
    const { reader, local, remote } = await fixture.blockPair(16_384, 1024, 6);
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
    const { reader, owner, local, remote } = await fixture.blockPair(lengthBytes, 4096, 4);
    const count = lengthBytes / 4096;
    const localIds = scattered(count, 2741);
    const remoteIds = scattered(count, 911);
    for (const operation of fixture.operations) {
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
    const lists: Awaited<ReturnType<Fixture["blockLists"]>>[] = [];
    for (const seed of [10, 11, 12])
      lists.push(await fixture.blockLists(reader, await fixture.side(64 * 1024, seed), 1024));
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
    const { reader, local, remote } = await fixture.blockPair(8192, 1024);
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

/** With and without offsets, runs move the same bytes as pairs. */
export function descriptorRunTests(fixture: Fixture): void {
  const { waitFor } = fixture;

  test("runs move the same bytes as pairs: of strided rows, across rows, of different lengths, in both directions", async () => {
    for (const operation of fixture.operations) {
      const { reader, owner } = await fixture.introduced(32_768, 2);
      // Neighbours, gaps, then another length. The remote's rows end at other indices.
      const localRows = [
        [0, 256, 256, 16],
        [8192, 256, 512, 8],
        [16_384, 512, 512, 8],
      ] as const;
      const remoteRows = [
        [1024, 256, 256, 10],
        [8192, 256, 1024, 14],
        [24_576, 512, 512, 9],
      ] as const;
      const local = await fixture.prepare(reader.agent, reader, ...localRows);
      const remote = await fixture.prepare(reader.agent, owner, ...remoteRows);
      const runs = Int32Array.of(2, 1, 20, 26, 25, 5, 0, 23, 1, 31, 32, 1);
      const move = (spelling: DescriptorPairs | DescriptorRuns) =>
        waitFor(reader.agent.transfer({ operation, local, remote, ...spelling }).done);
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
        expectBytes(bytes, expected[side] as Uint8Array);
      }
      const [untouched, touched] = operation === "READ" ? [1, 0] : [0, 1];
      expectBytes(moved[untouched] as Uint8Array, pattern(32_768, untouched + 2));
      expect(Buffer.compare(moved[touched] as Uint8Array, pattern(32_768, touched + 2))).not.toBe(
        0,
      );
    }
  });

  test("runs with offsets move the same bytes as pairs", async () => {
    const { reader, local, remote } = await fixture.blockPair(32_768, 512, 2);
    // Single, adjacent, and so long that a transport may use another code path.
    for (const spelling of [
      { runs: Int32Array.of(1, 4, 1, 3, 0, 2), offsets: Int32Array.of(0, 0, 5, 20, 20, 7) },
      { runs: Int32Array.of(0, 2, 20), offsets: Int32Array.of(40, 1) },
    ]) {
      const after = async (descriptors: DescriptorPairs | DescriptorRuns) => {
        reader.memory.bytes.set(pattern(32_768, 2));
        await waitFor(
          reader.agent.transfer({ operation: "READ", local, remote, ...descriptors }).done,
        );
        return reader.memory.bytes.slice();
      };
      const pairs = descriptorPairs(spelling);
      const expected = await after(pairs);
      expect(Buffer.compare(expected, pattern(32_768, 2))).not.toBe(0);
      expectBytes(await after(spelling), expected);
    }
  });

  test("runs are copied at the call, and their notification arrives after the last byte", async () => {
    const { reader, owner, local, remote } = await fixture.blockPair(16_384, 1024);
    const inbox = owner.agent.notifications();
    const runs = Int32Array.of(8, 0, 8);
    const { done } = reader.agent.transfer({
      operation: "READ",
      local,
      remote,
      runs,
      notification: bytes("run"),
    });
    runs.fill(0);
    await waitFor(done);
    expect(await fixture.nextText(inbox)).toBe("run");
    const expected = pattern(16_384, 0);
    expected.set(pattern(16_384, 1).subarray(0, 8192), 8192);
    expectBytes(reader.memory.bytes, expected);
    await inbox.return?.();
  });
}

type Change = Partial<Record<keyof TransferRequest, unknown>>;
type Lists = Record<"local" | "remote" | "odd", PreparedList>;

const ids = (...numbers: number[]) => Int32Array.of(...numbers);
const RUNS = ids(0, 2, 3, 4, 0, 1);
const PAIRS = { localIds: ids(0, 1), remoteIds: ids(2, 3) };

/** Of `PAIRS` between two lists of 8 blocks. `odd` has blocks of two sizes. */
const WRONG_PAIRS = ({ local, remote, odd }: Lists): readonly Change[] => [
  { localIds: ids(0) },
  { remoteIds: ids(2, 3, 4) },
  { localIds: ids(), remoteIds: ids() },
  { localIds: ids(0, 8) },
  { remoteIds: ids(2, 8) },
  { localIds: ids(-1, 0) },
  { remoteIds: ids(2, -2147483648) },
  { local: odd, localIds: ids(4, 5) },
  { local: remote, remote: local },
  { remote: local },
  { operation: "COPY" },
  { localIds: [0, 1] },
  { timeoutMs: Number.NaN },
  { timeoutMs: -1 },
  { notification: "text" },
];

const WRONG_RUNS = ({ odd }: Lists): readonly Change[] => [
  { runs: ids() },
  { runs: ids(0, 0) },
  { runs: ids(0, 0, 0) },
  { runs: ids(0, 0, -1) },
  { runs: ids(-1, 0, 1) },
  { runs: ids(0, -1, 2) },
  { runs: ids(0, 0, 9) },
  { runs: ids(7, 0, 2) },
  { runs: ids(0, 7, 2) },
  { runs: ids(0, 0, 1, 2, 7, 2147483647) },
  { runs: [0, 0, 1] },
  { runs: ids(0, 0, 1), localIds: ids(0), remoteIds: ids(0) },
  { runs: ids(0, 0, 5), local: odd },
  {},
];

const WRONG_OFFSETS = (): readonly Change[] => [
  { runs: RUNS, offsets: ids(0, 0, 4, 0) },
  { runs: RUNS, offsets: ids(0, 4) },
  { runs: RUNS, offsets: ids(-1, 0) },
  { runs: RUNS, offsets: ids(0, -1) },
  { runs: RUNS, offsets: ids(2 ** 31 - 1, 0) },
  { runs: RUNS, offsets: ids(0) },
  { runs: RUNS, offsets: ids() },
  { runs: RUNS, offsets: [0, 0] },
  { localIds: ids(0), remoteIds: ids(0), offsets: ids(0, 0) },
];

/** As pairs and as runs, they throw synchronously. */
export function invalidTransferTests(fixture: Fixture): void {
  test.each([
    ["with invalid arguments", PAIRS, WRONG_PAIRS],
    ["with invalid runs", {}, WRONG_RUNS],
    [
      "with offsets that move a run out of its list, are no rows, or come with pairs",
      {},
      WRONG_OFFSETS,
    ],
  ] as const)("a transfer %s throws at once and moves nothing", async (_what, right, wrong) => {
    const { reader, local, remote } = await fixture.blockPair(8192, 1024);
    const rows = [
      [0, 1024, 1024, 4],
      [4096, 512, 512, 4],
    ] as const;
    const odd = await fixture.prepare(reader.agent, reader, ...rows);
    const plain = { operation: "READ", local, remote, ...right };
    for (const change of wrong({ local, remote, odd })) {
      const request = { ...plain, ...change } as unknown as TransferRequest;
      const codes = ["KV_TRANSFER_INVALID", "KV_NOTIFICATION_INVALID"] as const;
      expectThrown(
        () => reader.agent.transfer(request),
        ...("notification" in change ? codes : codes.slice(0, 1)),
      );
    }
    await fixture.waitFor(remote.close());
    expectThrown(
      () => reader.agent.transfer({ ...readOf({ local, remote }, ids(0, 1)), ...PAIRS }),
      "KV_LIST_CLOSED",
    );
    expect(reader.agent.telemetry()).toMatchObject({ transfersPosted: 0, transfersInFlight: 0 });
    expectBytes(reader.memory.bytes, pattern(8192, 0));
  });

  test("lists of another agent are rejected", async () => {
    const reader = await fixture.side(8192, 0);
    const other = await fixture.side(8192, 0);
    const owner = await fixture.side(8192, 1);
    const own = await fixture.blockLists(reader, owner, 1024);
    const others = await fixture.blockLists(other, owner, 1024);
    for (const mixed of [{ local: others.local }, { remote: others.remote }]) {
      const request = readOf({ ...own, ...mixed }, ids(0));
      expectThrown(() => reader.agent.transfer(request), "KV_TRANSFER_INVALID");
    }
  });
}
