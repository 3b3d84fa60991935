import type { DescriptorPairs, DescriptorRuns } from "@kv/interface";
import { type NixlAgent, nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { pairOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";

const BLOCK = 4096;
const BLOCKS = 1024;
type Rows = readonly [offset: number, stride: number, count: number][];

/**
 * The descriptors that a fake of NIXL gets. It ends the process when one is not registered, or when
 * the lengths of a pair differ.
 */
describe.skipIf(fakeMissing)(`merging of descriptors (${fakeMissing ?? "fake found"})`, () => {
  const transport = nixlTransport({ library: FAKE_NIXL });
  let pair: Awaited<ReturnType<typeof pairOf<NixlAgent>>>;
  beforeAll(async () => {
    pair = await pairOf(transport, 4 * BLOCK * BLOCKS, BLOCK);
  });
  afterAll(() => pair?.close());

  const LAYERS = [0, 1, 2].map((layer): [number, number, number] => [
    layer * BLOCK * BLOCKS,
    BLOCK,
    BLOCKS,
  ]);
  const ids = scattered(40);

  test.each<[string, number, Rows, DescriptorPairs | DescriptorRuns]>([
    [
      "blocks that are consecutive on both sides become one descriptor, named by runs",
      1,
      LAYERS,
      { runs: Int32Array.of(10, 500, 300) },
    ],
    [
      "blocks that are consecutive on both sides become one descriptor, named by ids",
      1,
      LAYERS,
      { localIds: ids.map((id) => id + 10), remoteIds: ids.map((id) => id + 500) },
    ],
    [
      "never across rows, even adjacent ones, because they may be separate registrations",
      3,
      LAYERS,
      { runs: Int32Array.of(900, 900, 1200) },
    ],
    [
      "only within a slice of 8 MiB",
      3,
      [[0, BLOCK, 4 * BLOCKS]],
      { runs: Int32Array.of(0, 0, 4 * BLOCKS) },
    ],
    ["not blocks with gaps", 40, [[0, 2 * BLOCK, BLOCKS]], { runs: Int32Array.of(0, 5, 40) }],
    [
      "not blocks that are consecutive on one side only",
      40,
      LAYERS,
      { localIds: ids, remoteIds: ids.map((id) => 3 * id) },
    ],
  ])("%s", async (_, merged, rows, descriptors) => {
    const { reader, owner, target, source } = pair;
    const table = (address: number) => ({
      memoryType: "DRAM" as const,
      rows: Float64Array.from(
        rows.flatMap(([offset, stride, count]) => [address + offset, BLOCK, 0, stride, count]),
      ),
    });
    await using local = await reader.prepareLocal(table(target.address));
    await using remote = await reader.prepareRemote(owner.name, table(source.address));
    source.bytes.fill(7);
    target.bytes.fill(0);
    const request = { operation: "READ", local, remote, ...descriptors } as const;
    const { mergedCount, descriptorCount } = await reader.transfer(request).done;
    expect(mergedCount).toBe(merged);
    const moved = target.bytes.filter((byte) => byte === 7).length;
    expect(moved).toBe(descriptorCount * BLOCK);
  });
});
