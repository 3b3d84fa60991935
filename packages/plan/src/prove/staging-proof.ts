import type { StagedCopy, StagedPlane, StagingLayout } from "@kv/interface";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { type BlockContents, placeAt, type Tile } from "./contents/block-contents.js";
import { fail } from "./proof-result.js";

/** The blocks of one region as they are on the wire, for the proof of a stage behind them. */
export interface StagedRegion {
  /** The subject of messages: "the local rank". */
  readonly owner: string;
  readonly rank: RankGeometry;
  readonly region: RegionGeometry;
  readonly contents: BlockContents;
}

/** A stretch of bytes that a stage moves. */
interface Piece {
  readonly plane: number;
  readonly device: number;
  readonly wire: number;
  readonly lengthBytes: number;
}

/**
 * Proves that a stage neither loses nor mixes bytes. Within a block each byte of the wire that is
 * not padding is one byte of the device, of the same head, token and place within the cell, and
 * each byte of the device is one of the wire. So a proof of wire blocks holds for device blocks,
 * with a stage on either side or on both.
 */
export function proveStage(stage: StagingLayout, staged: StagedRegion): void {
  const { owner, region, contents } = staged;
  const at = { stage: owner, region: region.name };
  const planes = [...stage.planes.entries()].filter(([, plane]) => plane.region === region.name);
  if (planes.length === 0)
    fail("stage", `${owner}: no plane of the device stands behind region "${region.name}"`, at);
  const pieces = stage.copies.flatMap((copy) =>
    planes.some(([index]) => index === copy.plane) ? piecesOf(copy) : [],
  );
  const [wireTile, ...others] = contents.tiles;
  if (wireTile === undefined || others.length > 0)
    fail("stage", `${owner}: a block of "${region.name}" is not heads and tokens of one cache`, at);
  coverOnce(pieces, "wire", wireTile.offset, wireTile.lengthBytes, at);
  for (const [index, plane] of planes) {
    const own = pieces.filter((piece) => piece.plane === index);
    coverOnce(own, "device", 0, plane.blockLengthBytes, { ...at, plane: plane.name });
    const device = contentsOfPlane(plane, wireTile, contents, at);
    for (const piece of own) followPiece(piece, device, contents, { ...at, plane: plane.name });
  }
}

function piecesOf(copy: StagedCopy): Piece[] {
  return Array.from({ length: copy.count }, (_, index) => ({
    plane: copy.plane,
    device: copy.deviceOffsetBytes + index * copy.deviceStrideBytes,
    wire: copy.wireOffsetBytes + index * copy.wireStrideBytes,
    lengthBytes: copy.lengthBytes,
  }));
}

/** The pieces cover `lengthBytes` bytes from `begin` on, with no gap and no overlap. */
function coverOnce(
  pieces: readonly Piece[],
  side: "device" | "wire",
  begin: number,
  lengthBytes: number,
  at: Readonly<Record<string, string>>,
): void {
  let next = begin;
  for (const piece of [...pieces].sort((one, other) => one[side] - other[side])) {
    if (piece[side] !== next || !(piece.lengthBytes > 0)) {
      const what =
        piece[side] < next ? "are moved twice, or lie outside" : "are moved by nothing before them";
      fail("stage", `${piece.lengthBytes} bytes from ${piece[side]} of a ${side} block ${what}`, {
        ...at,
        offset: piece[side],
        expected: next,
      });
    }
    next += piece.lengthBytes;
  }
  if (next === begin + lengthBytes) return;
  fail("stage", `a stage moves ${next - begin} of the ${lengthBytes} bytes of a ${side} block`, {
    ...at,
    moved: next - begin,
    lengthBytes,
  });
}

/**
 * The contents of a plane's block: the heads and tokens of the wire block in the plane's order,
 * with the plane's part of each cell.
 */
function contentsOfPlane(
  plane: StagedPlane,
  wire: Tile,
  contents: BlockContents,
  at: Readonly<Record<string, string>>,
): BlockContents {
  const { cellBytes, cellBeginBytes } = plane;
  const order = plane.order === "head-major" ? ["head", "token"] : ["token", "head"];
  const axes = [...wire.axes].sort(
    (one, other) => order.indexOf(one.axis) - order.indexOf(other.axis),
  );
  const cells = axes.reduce((product, { size }) => product * size, 1);
  if (cells * cellBytes !== plane.blockLengthBytes) {
    fail(
      "stage",
      `plane "${plane.name}": a block of ${plane.blockLengthBytes} bytes is not ${cells} cells of ${cellBytes}`,
      { ...at, plane: plane.name },
    );
  }
  const tile: Tile = {
    name: plane.name,
    offset: 0,
    lengthBytes: plane.blockLengthBytes,
    axes,
    cellBytes,
    cellBegin: cellBeginBytes,
  };
  return { ...contents, tiles: [tile] };
}

/**
 * Proves cell by cell that the bytes of a piece have the same contents on the device and on the
 * wire.
 */
function followPiece(
  piece: Piece,
  device: BlockContents,
  wire: BlockContents,
  at: Readonly<Record<string, string>>,
): void {
  for (let into = 0; into < piece.lengthBytes; ) {
    const [here, there] = [placeAt(device, piece.device + into), placeAt(wire, piece.wire + into)];
    if (here === undefined || there === undefined)
      fail("stage", "a stage moves bytes beyond a block", { ...at, offset: piece.wire + into });
    else if (
      here.head !== there.head ||
      here.token !== there.token ||
      here.cellByte !== there.cellByte
    ) {
      fail(
        "stage",
        `byte ${piece.wire + into} of a wire block is head ${there.head}, token ${there.token}, byte ${there.cellByte} of the cell; the device ` +
          `has head ${here.head}, token ${here.token}, byte ${here.cellByte} there`,
        { ...at, offset: piece.wire + into },
      );
    }
    into += Math.min(here.cellRest, there.cellRest);
  }
}
