import type { StagedCopy, StagedPlane, StagingLayout } from "@kv/interface";
import type { MovedBytes } from "../request/receive-pass.js";
import {
  type BlockContents,
  firstDifference,
  inOrder,
  type Label,
  labelsOf,
  moved,
  type Tile,
} from "./block-labels.js";
import { regionsHolding } from "./cache-semantics.js";
import { fail, type PlanFault } from "./proof-result.js";
import type { ProofSubject } from "./proof-subject.js";

/** Copies between a device and the registered memory, equal on all ranks of an engine. */
export interface Stagings {
  readonly local?: StagingLayout | undefined;
  readonly remote?: StagingLayout | undefined;
}

export function proveStages(
  { plan, remotes, contents }: ProofSubject,
  { local, remote }: Stagings,
): void {
  for (const group of plan.groups.keys()) {
    for (const index of regionsHolding(plan.local, group)) {
      const found = contents(index, group);
      const own = plan.local.regions[index];
      if (local !== undefined && own !== undefined)
        proveStage(local, "the local rank", own.name, found.local);
      for (const [source, rank] of remotes.entries()) {
        const theirs = found.sources[source];
        const region = rank.regions[found.remoteRegions[source] ?? -1];
        if (remote !== undefined && theirs !== undefined && region !== undefined)
          proveStage(remote, `remote rank ${rank.tpRank}`, region.name, theirs);
      }
    }
  }
}

/**
 * Labels moved from device to wire, and back, must be those of the other block. So a proof of wire
 * blocks holds for device blocks.
 */
function proveStage(
  stage: StagingLayout,
  owner: string,
  region: string,
  contents: BlockContents,
): void {
  const at = { stage: owner, region };
  const planes = [...stage.planes.entries()].filter(([, plane]) => plane.region === region);
  if (planes.length === 0)
    fail("stage", `${owner}: no plane of the device stands behind region "${region}"`, at);
  const [wireTile, ...others] = contents.tiles;
  if (wireTile === undefined || others.length > 0)
    fail("stage", `${owner}: a block of "${region}" is not heads and tokens of one cache`, at);

  const wire = labelsOf(contents);
  const onWire: Label[] = [];
  for (const [index, plane] of planes) {
    const where = { ...at, plane: plane.name };
    const device = labelsOfPlane(plane, wireTile, contents, where);
    const pieces = stage.copies.filter((copy) => copy.plane === index).flatMap(piecesOf);
    onWire.push(...pieces.flatMap((piece) => landed(device, piece, "device", where)));
    const back = pieces.flatMap(({ from, at: to, lengthBytes }) =>
      landed(wire, { from: to, at: from, lengthBytes }, "wire", where),
    );
    compare(device, back, "device", where);
  }
  compare(wire, onWire, "wire", at);
}

function piecesOf(copy: StagedCopy): MovedBytes[] {
  return Array.from({ length: copy.count }, (_, index) => ({
    from: copy.deviceOffsetBytes + index * copy.deviceStrideBytes,
    at: copy.wireOffsetBytes + index * copy.wireStrideBytes,
    lengthBytes: copy.lengthBytes,
  }));
}

function labelsOfPlane(
  { name, order, cellBytes, cellBeginBytes, blockLengthBytes }: StagedPlane,
  wire: Tile,
  contents: BlockContents,
  at: PlanFault["at"],
): readonly Label[] {
  const cells = wire.heads.size * wire.steps;
  if (cells * cellBytes !== blockLengthBytes)
    fail(
      "stage",
      `plane "${name}": a block of ${blockLengthBytes} bytes is not ${cells} cells of ${cellBytes}`,
      at,
    );
  const tile = { ...wire, offset: 0, order, cellBytes, firstByte: cellBeginBytes };
  return labelsOf({ ...contents, tiles: [tile] });
}

type Side = "device" | "wire";

function landed(labels: readonly Label[], piece: MovedBytes, side: Side, at: PlanFault["at"]) {
  const found = moved(labels, piece);
  const bytes = found.reduce((sum, label) => sum + label.lengthBytes, 0);
  if (bytes === piece.lengthBytes && bytes > 0) return found;
  return fail(
    "stage",
    `${piece.lengthBytes} bytes from ${piece.from} of a ${side} block are moved, of which ${bytes} lie in it`,
    { ...at, offset: piece.from },
  );
}

function compare(
  wanted: readonly Label[],
  found: readonly Label[],
  side: Side,
  at: PlanFault["at"],
): void {
  const got = inOrder(found);
  for (const [index, label] of got.entries()) {
    const before = got[index - 1];
    if (before !== undefined && before.at + before.lengthBytes > label.at)
      fail(
        "stage",
        `${label.lengthBytes} bytes from ${label.at} of a ${side} block are moved twice`,
        { ...at, offset: label.at },
      );
  }
  for (const want of wanted) {
    const different = firstDifference(want, moved(got, { ...want, from: want.at }));
    if (different === undefined) continue;
    const { at: offset, byte, got: other } = different;
    const what =
      other === undefined
        ? "is moved by nothing"
        : `is head ${want.head}, token ${want.token}, byte ${byte} of the cell; the other side has head ${other.head}, token ${other.token}, byte ${other.byte} there`;
    fail("stage", `byte ${offset} of a ${side} block ${what}`, { ...at, offset });
  }
}
