import type { DescriptorPairs, DescriptorRuns } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterAll, beforeAll, describe, expect, test } from "vitest";

const BLOCK = 4096;
const BLOCKS = 1024;

/**
 * The descriptors that a fake of NIXL gets. It ends the process when one is not registered, or when
 * the lengths of a pair differ.
 */
describe.skipIf(fakeMissing)(`merging of descriptors (${fakeMissing ?? "fake found"})`, () => {
  const transport = nixlTransport({ library: FAKE_NIXL });
  const memories = [0, 1].map(() => transport.allocate(4 * BLOCK * BLOCKS));
  let move: (
    rows: readonly [offset: number, stride: number, count: number][],
    what: DescriptorPairs | DescriptorRuns,
  ) => Promise<number | undefined>;

  beforeAll(async () => {
    const [target, source] = memories;
    if (target === undefined || source === undefined) throw new Error("no memory");
    const [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
    await reader.register(target);
    await owner.register(source);
    await reader.addRemote(await owner.localMetadata());
    move = async (rows, what) => {
      const table = (address: number) => ({
        memoryType: "DRAM" as const,
        rows: Float64Array.from(
          rows.flatMap(([offset, stride, count]) => [address + offset, BLOCK, 0, stride, count]),
        ),
      });
      const local = await reader.prepareLocal(table(target.address));
      const remote = await reader.prepareRemote(owner.name, table(source.address));
      source.bytes.fill(7);
      target.bytes.fill(0);
      const { mergedCount, descriptorCount } = await reader.transfer({
        operation: "READ",
        local,
        remote,
        ...what,
      }).done;
      expect(target.bytes.reduce((sum, byte) => sum + (byte === 7 ? 1 : 0), 0)).toBe(
        descriptorCount * BLOCK,
      );
      await local.close();
      await remote.close();
      return mergedCount;
    };
  });
  afterAll(async () => {
    await transport.close();
    for (const memory of memories) memory.close();
  });

  const layers = [0, 1, 2].map((layer): [number, number, number] => [
    layer * BLOCK * BLOCKS,
    BLOCK,
    BLOCKS,
  ]);

  test("blocks that are consecutive on both sides become one descriptor, named by ids or by runs", async () => {
    const runs = Int32Array.of(10, 500, 300);
    const ids = (first: number) => Int32Array.from({ length: 300 }, (_, index) => first + index);
    expect(await move(layers, { runs })).toBe(1);
    expect(await move(layers, { localIds: ids(10), remoteIds: ids(500) })).toBe(1);
  });

  test("never across rows, even adjacent ones, because they may be separate registrations", async () => {
    expect(await move(layers, { runs: Int32Array.of(900, 900, 1200) })).toBe(3);
  });

  test("only within a slice of 8 MiB", async () => {
    expect(await move([[0, BLOCK, 4 * BLOCKS]], { runs: Int32Array.of(0, 0, 4 * BLOCKS) })).toBe(3);
  });

  test("not blocks with gaps, or blocks that are consecutive on one side only", async () => {
    expect(await move([[0, 2 * BLOCK, BLOCKS]], { runs: Int32Array.of(0, 5, 40) })).toBe(40);
    const localIds = Int32Array.from({ length: 40 }, (_, index) => index);
    expect(await move(layers, { localIds, remoteIds: localIds.map((id) => 3 * id) })).toBe(40);
  });
});
