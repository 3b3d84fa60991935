import { type DescriptorPairs, type DescriptorRuns, descriptorPairs } from "@kv/interface";
import { expect, test } from "vitest";
import {
  blockPair,
  bytes,
  expectBytes,
  type Fixture,
  introduced,
  nextText,
  operations,
  pattern,
  prepare,
} from "./fixture.js";

/** Descriptors as runs, with and without offsets, move the same bytes as the equivalent pairs. */
export function descriptorRunTests(fixture: Fixture): void {
  const { waitFor } = fixture;

  test("runs move the same bytes as pairs: of strided rows, across rows, of different lengths, in both directions", async () => {
    for (const operation of operations(fixture)) {
      const { reader, owner } = await introduced(fixture, 32_768, 2);
      // Neighbours in memory; then gaps between descriptors; then another length. The remote's rows
      // end at other indices.
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
      const local = await prepare(fixture, reader.agent, reader, ...localRows);
      const remote = await prepare(fixture, reader.agent, owner, ...remoteRows);
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
    const { reader, local, remote } = await blockPair(fixture, 32_768, 512, 2);
    // Single, adjacent, and runs so long that a transport may use another code path.
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
    const { reader, owner, local, remote } = await blockPair(fixture, 16_384, 1024);
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
    expect(await nextText(fixture, inbox)).toBe("run");
    const expected = pattern(16_384, 0);
    expected.set(pattern(16_384, 1).subarray(0, 8192), 8192);
    expectBytes(reader.memory.bytes, expected);
    await inbox.return?.();
  });
}
