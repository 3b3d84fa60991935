import { describe, expect, test } from "vitest";
import {
  type AttentionShape,
  type AttentionSide,
  copiedPiece,
  directPieces,
  isPlainCopy,
  isTokenByToken,
  partsOfBlocks,
  partsOfShape,
} from "./attention-pieces.js";

const CELL = 8;
const side = (order: AttentionSide["order"], heads: number, tokens = 4): AttentionSide => ({
  order,
  heads,
  tokens,
  blockBytes: heads * tokens * CELL,
});
const hnd = (heads: number, tokens = 4) => side("head-major", heads, tokens);
const nhd = (heads: number, tokens = 4) => side("token-major", heads, tokens);
const opaque = (heads: number) => side("opaque", heads);

/**
 * The shared heads start at `localHead` in the local block and at `remoteHead` in the remote block.
 */
function shape(
  local: AttentionSide,
  remote: AttentionSide,
  { sharedHeads = Math.min(local.heads, remote.heads), localHead = 0, remoteHead = 0 } = {},
): AttentionShape {
  return { local, remote, sharedHeads, localHead: () => localHead, remoteHead };
}
const SOURCE = { tpRank: 0, stateIndex: 0 };
const WHOLE = { localParts: 1, remoteParts: 1 };
const HALVES = { localParts: 2, remoteParts: 1 };
const OF_TWO = { localParts: 1, remoteParts: 2 };

describe("isPlainCopy: a copied part needs no reordering", () => {
  test.each([
    ["whole head-major blocks", shape(hnd(2), hnd(2)), WHOLE, true],
    ["whole token-major blocks", shape(nhd(2), nhd(2)), WHOLE, true],
    ["whole blocks of unknown order", shape(opaque(2), opaque(2)), WHOLE, true],
    ["a head of a head-major block", shape(hnd(1), hnd(2)), WHOLE, true],
    ["one head, head-major here and token-major there", shape(hnd(1), nhd(1)), WHOLE, true],
    ["one head, in parts", shape(hnd(1, 8), nhd(1)), HALVES, true],
    ["all heads of token-major blocks, in parts", shape(nhd(2, 8), nhd(2)), HALVES, true],
    ["several heads in different orders", shape(hnd(2), nhd(2)), WHOLE, false],
    ["one head of a remote token-major block", shape(hnd(1), nhd(2)), WHOLE, false],
    ["one head of a local token-major block", shape(nhd(2), hnd(1)), WHOLE, false],
    ["several heads, local block in two parts", shape(hnd(2, 8), hnd(2)), HALVES, false],
    ["several heads, remote block in two parts", shape(hnd(2), hnd(2, 8)), OF_TWO, false],
    ["some heads of a token-major block, in parts", shape(nhd(2, 8), nhd(4)), HALVES, false],
    [
      "one head of unknown order, local block in two parts",
      shape(opaque(1), opaque(1)),
      HALVES,
      false,
    ],
    [
      "one remote head of unknown order, remote block in two parts",
      shape(hnd(1), opaque(1)),
      OF_TWO,
      false,
    ],
  ])("%s", (_, given, parts, plain) => {
    expect(isPlainCopy(given, parts)).toBe(plain);
  });
});

describe("isTokenByToken: whether blocks need single-token pieces", () => {
  test.each([
    ["head-major on both sides", shape(hnd(2), hnd(2)), false],
    ["head-major on both sides, some of the remote heads", shape(hnd(2), hnd(4)), false],
    ["token-major here", shape(nhd(2), hnd(2)), true],
    ["token-major there", shape(hnd(2), nhd(2)), true],
    ["token-major here, one head", shape(nhd(1), hnd(1)), false],
    ["token-major on both sides, all heads", shape(nhd(2), nhd(2)), false],
    ["token-major on both sides, some of the local heads", shape(nhd(4), nhd(2)), true],
    ["token-major on both sides, some of the remote heads", shape(nhd(2), nhd(4)), true],
    ["one head, token-major there with two heads", shape(hnd(1), nhd(2)), true],
  ])("%s", (_, given, expected) => {
    expect(isTokenByToken(given)).toBe(expected);
  });
});

describe("number of parts per block", () => {
  const cuts = (tokenByToken: boolean) => ({ parts: HALVES, tokenByToken });

  test("is the given one when blocks are not cut token by token", () => {
    expect(partsOfBlocks(cuts(false), { local: 16, remote: 4 })).toEqual(HALVES);
    expect(partsOfShape(cuts(false), shape(nhd(2, 16), hnd(2, 4)))).toEqual(HALVES);
  });

  test("is the number of tokens per block when blocks are cut token by token", () => {
    const tokens = { localParts: 16, remoteParts: 4 };
    expect(partsOfBlocks(cuts(true), { local: 16, remote: 4 })).toEqual(tokens);
    expect(partsOfShape(cuts(true), shape(nhd(2, 16), hnd(2, 4)))).toEqual(tokens);
  });
});

/** The pieces with their local and remote places resolved. */
const seen = (pieces: readonly ReturnType<typeof copiedPiece>[]) =>
  pieces.map(({ local, remote, ...piece }) => ({
    ...piece,
    local: local(SOURCE),
    remote: remote(SOURCE),
  }));

test("a copied piece holds the shared heads of a part, and the part stride is the part length on each side", () => {
  const given = shape(hnd(4, 8), hnd(2, 4), { sharedHeads: 2, localHead: 2 });
  expect(seen([copiedPiece(given, HALVES)])).toEqual([
    {
      name: "",
      unit: "kernel-block",
      ...HALVES,
      // Two heads of four tokens; a local part has four heads.
      lengthBytes: 2 * 4 * CELL,
      local: { offsetBytes: 2 * 4 * CELL, partStrideBytes: 4 * 4 * CELL },
      remote: { offsetBytes: 0, partStrideBytes: 2 * 4 * CELL },
    },
  ]);
  const [piece] = seen([copiedPiece(shape(hnd(1, 4), hnd(2, 8), { remoteHead: 1 }), OF_TWO)]);
  expect(piece?.remote).toEqual({ offsetBytes: 4 * CELL, partStrideBytes: 2 * 4 * CELL });
  expect(piece?.local).toEqual({ offsetBytes: 0, partStrideBytes: 4 * CELL });
});

describe("direct pieces", () => {
  test("are one copied piece when the part needs no reordering", () => {
    const given = shape(hnd(2), hnd(2));
    expect(seen(directPieces(given, WHOLE))).toEqual(seen([copiedPiece(given, WHOLE)]));
  });

  test("hold one head each between head-major blocks of different sizes", () => {
    const given = shape(hnd(3, 8), hnd(2, 4), { sharedHeads: 2, localHead: 1 });
    expect(seen(directPieces(given, HALVES))).toEqual(
      [0, 1].map((head) => ({
        name: `head ${head}`,
        unit: "kernel-block",
        ...HALVES,
        lengthBytes: 4 * CELL,
        local: { offsetBytes: (1 + head) * 8 * CELL, partStrideBytes: 4 * CELL },
        remote: { offsetBytes: head * 4 * CELL, partStrideBytes: 4 * CELL },
      })),
    );
  });

  test("hold one head of one token each between head-major and token-major blocks", () => {
    const tokens = { localParts: 4, remoteParts: 4 };
    const given = shape(hnd(2), nhd(4), { sharedHeads: 2, remoteHead: 2 });
    expect(seen(directPieces(given, tokens))).toEqual(
      [0, 1].map((head) => ({
        name: `head ${head}`,
        unit: "kernel-block",
        ...tokens,
        lengthBytes: CELL,
        local: { offsetBytes: head * 4 * CELL, partStrideBytes: CELL },
        remote: { offsetBytes: (2 + head) * CELL, partStrideBytes: 4 * CELL },
      })),
    );
  });

  test("hold one head of one token each when the local side is the token-major one", () => {
    const tokens = { localParts: 4, remoteParts: 4 };
    const pieces = seen(directPieces(shape(nhd(2), hnd(2)), tokens));
    expect(pieces.map(({ name, lengthBytes }) => [name, lengthBytes])).toEqual([
      ["head 0", CELL],
      ["head 1", CELL],
    ]);
    expect(pieces[1]).toMatchObject({
      local: { offsetBytes: CELL, partStrideBytes: 2 * CELL },
      remote: { offsetBytes: 4 * CELL, partStrideBytes: CELL },
    });
  });

  test("hold all shared heads of one token when both sides are token-major", () => {
    const tokens = { localParts: 4, remoteParts: 4 };
    const given = shape(nhd(3), nhd(4), { sharedHeads: 2, localHead: 1, remoteHead: 2 });
    expect(seen(directPieces(given, tokens))).toEqual([
      {
        name: "",
        unit: "kernel-block",
        ...tokens,
        lengthBytes: 2 * CELL,
        local: { offsetBytes: CELL, partStrideBytes: 3 * CELL },
        remote: { offsetBytes: 2 * CELL, partStrideBytes: 4 * CELL },
      },
    ]);
  });

  test.each([
    ["one local head", nhd(1), nhd(4)],
    ["one remote head", nhd(4), nhd(1)],
  ])("have no head number in their name when one head is shared: %s", (_, local, remote) => {
    const pieces = directPieces(shape(local, remote), { localParts: 4, remoteParts: 4 });
    expect(pieces.map(({ name, lengthBytes }) => [name, lengthBytes])).toEqual([["", CELL]]);
  });
});
