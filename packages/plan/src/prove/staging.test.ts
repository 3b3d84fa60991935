import type { StagedCopy, StagingLayout } from "@kv/interface";
import { expect, test } from "vitest";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { samplePlan, sampleRank } from "../sample-pair.test-support.js";
import { provePlan } from "./prove-plan.js";

const HEADS = 4;
/** K, or V, of one head and token; the sample's cells are both. */
const ROW_BYTES = 4;

/**
 * A device with separate K and V arrays; the wire has K and V side by side. The device may be
 * head-major or token-major.
 */
function stageOf(
  rank: RankGeometry,
  order: "head-major" | "token-major" = "head-major",
): StagingLayout {
  const heads = HEADS / rank.tpSize;
  const tokens = rank.kernelBlockSize;
  const planes = rank.regions.flatMap(({ name }) =>
    ["keys", "values"].map((part, half) => ({
      name: `${name} ${part}`,
      region: name,
      order,
      cellBeginBytes: half * ROW_BYTES,
      cellBytes: ROW_BYTES,
      blockLengthBytes: heads * tokens * ROW_BYTES,
    })),
  );
  const copies = planes.flatMap(({ cellBeginBytes }, plane): StagedCopy[] => {
    const piece = { plane, lengthBytes: ROW_BYTES, wireStrideBytes: 2 * ROW_BYTES };
    if (order === "head-major") {
      const all = {
        deviceOffsetBytes: 0,
        deviceStrideBytes: ROW_BYTES,
        wireOffsetBytes: cellBeginBytes,
      };
      return [{ ...piece, ...all, count: heads * tokens }];
    }
    return Array.from({ length: heads }, (_, head) => ({
      ...piece,
      deviceOffsetBytes: head * ROW_BYTES,
      deviceStrideBytes: heads * ROW_BYTES,
      wireOffsetBytes: cellBeginBytes + head * tokens * 2 * ROW_BYTES,
      count: tokens,
    }));
  });
  return { planes, copies };
}

const local = sampleRank({ kernelBlockSize: 32 });
const remotes = [sampleRank({ tpSize: 2 }), sampleRank({ tpSize: 2, tpRank: 1 })];
const plan = samplePlan(local, {}, { remotes });
const remote = stageOf(remotes[0] as RankGeometry);

const verdict = (own: StagingLayout) =>
  provePlan(plan, { remotes, numKvHeads: HEADS, staging: { local: own, remote } });

test("proves staged copies from device to device in both orders", () => {
  for (const order of ["head-major", "token-major"] as const) {
    const found = verdict(stageOf(local, order));
    expect(found).toMatchObject({ proven: true });
    expect(found.proven && found.statements.join()).toContain(
      "staging: each byte of a block on the wire",
    );
    expect(found.proven && found.assumed).toContain(
      "both copies pair a device block with the same pool block",
    );
  }
});

const sound = stageOf(local);
const withCopy = (change: (copy: StagedCopy) => Partial<StagedCopy>): StagingLayout => ({
  ...sound,
  copies: sound.copies.map((copy, index) => (index === 0 ? { ...copy, ...change(copy) } : copy)),
});
const cells = HEADS * 32;

test.each<[string, StagingLayout, string | RegExp]>([
  [
    "a piece is left out",
    withCopy(() => ({ count: cells - 1 })),
    /^byte 508 of a device block is moved by nothing/,
  ],
  [
    "a piece too many is moved",
    withCopy(() => ({ count: cells + 1 })),
    /^4 bytes from 512 of a device block are moved, of which 0 lie in it/,
  ],
  [
    "a piece is moved twice",
    { ...sound, copies: [...sound.copies, { ...(sound.copies[0] as StagedCopy), count: 1 }] },
    /^4 bytes from 0 of a device block are moved twice/,
  ],
  [
    "K and V are exchanged",
    {
      ...sound,
      planes: sound.planes.map((plane) => ({
        ...plane,
        cellBeginBytes: ROW_BYTES - plane.cellBeginBytes,
      })),
    },
    /^byte 0 of a device block is head 0, token 0, byte 4 of the cell; the other side has .* byte 0 there/,
  ],
  [
    "the device has another order",
    {
      ...sound,
      planes: sound.planes.map((plane) => ({ ...plane, order: "token-major" as const })),
    },
    "is head 1, token 0, byte 0 of the cell; the other side has head 0, token 1",
  ],
  [
    "a piece lands one byte late",
    withCopy((copy) => ({ wireOffsetBytes: copy.wireOffsetBytes + 1 })),
    "byte 0 of the cell; the other side has head 0, token 0, byte 1",
  ],
  [
    "a piece begins one byte late",
    withCopy((copy) => ({ deviceOffsetBytes: copy.deviceOffsetBytes + 1 })),
    "device block",
  ],
  ["pieces have length 0", withCopy(() => ({ lengthBytes: 0 })), "0 bytes from"],
  [
    "a layer has no plane",
    { ...sound, planes: sound.planes.filter(({ region }) => region !== "layer.1") },
    'no plane of the device stands behind region "layer.1"',
  ],
  [
    "a plane has another cell size",
    {
      ...sound,
      planes: sound.planes.map((plane) => ({ ...plane, cellBytes: 2 })),
    },
    "a block of 512 bytes is not 128 cells of 2",
  ],
])("reports the fault: %s", (_name, stage, message) => {
  const found = verdict(stage);
  if (found.proven) expect.fail("proven");
  expect(found.fault.kind).toBe("stage");
  expect(found.fault.message).toMatch(message);
});

test("reports a fault of the remote's staging with the remote rank", () => {
  const spoiled = { ...remote, copies: remote.copies.slice(1) };
  const found = provePlan(plan, { remotes, numKvHeads: HEADS, staging: { remote: spoiled } });
  expect(found).toMatchObject({
    proven: false,
    fault: { kind: "stage", at: { stage: "remote rank 0" } },
  });
});
