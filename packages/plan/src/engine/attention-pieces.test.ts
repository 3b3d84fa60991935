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
  ...{ order, heads, tokens, blockBytes: heads * tokens * CELL },
});
const hnd = (heads: number, tokens = 4) => side("head-major", heads, tokens);
const nhd = (heads: number, tokens = 4) => side("token-major", heads, tokens);
const opaque = (heads: number) => side("opaque", heads);

/** The shared heads begin at `localHead` here, and at `remoteHead` there. */
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

describe("a part that lands right as it is", () => {
  test.each([
    ["whole blocks of one order", shape(hnd(2), hnd(2)), WHOLE, true],
    ["whole blocks, tokens first", shape(nhd(2), nhd(2)), WHOLE, true],
    ["whole blocks of unknown order", shape(opaque(2), opaque(2)), WHOLE, true],
    ["a head of a head-major block", shape(hnd(1), hnd(2)), WHOLE, true],
    ["one head, whose orders are the same", shape(hnd(1), nhd(1)), WHOLE, true],
    ["one head, in parts", shape(hnd(1, 8), nhd(1)), HALVES, true],
    ["tokens of all heads, in parts", shape(nhd(2, 8), nhd(2)), HALVES, true],
    ["heads of unlike orders", shape(hnd(2), nhd(2)), WHOLE, false],
    ["a head of a token-major block there", shape(hnd(1), nhd(2)), WHOLE, false],
    ["a head of a token-major block here", shape(nhd(2), hnd(1)), WHOLE, false],
    ["several heads, in parts", shape(hnd(2, 8), hnd(2)), HALVES, false],
    ["several heads, in parts of the other side", shape(hnd(2), hnd(2, 8)), OF_TWO, false],
    ["some heads of tokens, in parts", shape(nhd(2, 8), nhd(4)), HALVES, false],
    ["one head of unknown order, in parts", shape(opaque(1), opaque(1)), HALVES, false],
    ["the same of the other side", shape(hnd(1), opaque(1)), OF_TWO, false],
  ])("%s", (_, given, parts, plain) => {
    expect(isPlainCopy(given, parts)).toBe(plain);
  });
});

describe("pieces of single tokens are needed where one side keeps a token's heads together", () => {
  test.each([
    ["heads first on both sides", shape(hnd(2), hnd(2)), false],
    ["heads first on both sides, and some of theirs", shape(hnd(2), hnd(4)), false],
    ["tokens first here", shape(nhd(2), hnd(2)), true],
    ["tokens first there", shape(hnd(2), nhd(2)), true],
    ["tokens first, of one head", shape(nhd(1), hnd(1)), false],
    ["tokens first on both sides, and all heads", shape(nhd(2), nhd(2)), false],
    ["tokens first on both sides, and some of our heads", shape(nhd(4), nhd(2)), true],
    ["tokens first on both sides, and some of theirs", shape(nhd(2), nhd(4)), true],
    ["one head of a token's two", shape(hnd(1), nhd(2)), true],
  ])("%s", (_, given, expected) => {
    expect(isTokenByToken(given)).toBe(expected);
  });
});

describe("blocks are cut", () => {
  const cuts = (tokenByToken: boolean) => ({ parts: HALVES, tokenByToken });

  test("in the same parts, however many tokens they hold", () => {
    expect(partsOfBlocks(cuts(false), { local: 16, remote: 4 })).toEqual(HALVES);
    expect(partsOfShape(cuts(false), shape(nhd(2, 16), hnd(2, 4)))).toEqual(HALVES);
  });

  test("into each of their own tokens", () => {
    const tokens = { localParts: 16, remoteParts: 4 };
    expect(partsOfBlocks(cuts(true), { local: 16, remote: 4 })).toEqual(tokens);
    expect(partsOfShape(cuts(true), shape(nhd(2, 16), hnd(2, 4)))).toEqual(tokens);
  });
});

/** What a piece is, with its places. */
const seen = (pieces: readonly ReturnType<typeof copiedPiece>[]) =>
  pieces.map(({ local, remote, ...piece }) => ({
    ...piece,
    local: local(SOURCE),
    remote: remote(SOURCE),
  }));

test("a copied piece is the shared heads of a part, each side's parts as far apart as they are long", () => {
  const given = shape(hnd(4, 8), hnd(2, 4), { sharedHeads: 2, localHead: 2 });
  expect(seen([copiedPiece(given, HALVES)])).toEqual([
    {
      ...{ name: "", unit: "kernel-block", ...HALVES },
      // Two heads of four tokens; a part of ours has four heads of them.
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
  test("are one where the part lands right as it is", () => {
    const given = shape(hnd(2), hnd(2));
    expect(seen(directPieces(given, WHOLE))).toEqual(seen([copiedPiece(given, WHOLE)]));
  });

  test("are a head each between head-major blocks of other sizes", () => {
    const given = shape(hnd(3, 8), hnd(2, 4), { sharedHeads: 2, localHead: 1 });
    expect(seen(directPieces(given, HALVES))).toEqual(
      [0, 1].map((head) => ({
        ...{ name: `head ${head}`, unit: "kernel-block", ...HALVES, lengthBytes: 4 * CELL },
        local: { offsetBytes: (1 + head) * 8 * CELL, partStrideBytes: 4 * CELL },
        remote: { offsetBytes: head * 4 * CELL, partStrideBytes: 4 * CELL },
      })),
    );
  });

  test("are a head of a token each between orders", () => {
    const tokens = { localParts: 4, remoteParts: 4 };
    const given = shape(hnd(2), nhd(4), { sharedHeads: 2, remoteHead: 2 });
    expect(seen(directPieces(given, tokens))).toEqual(
      [0, 1].map((head) => ({
        ...{ name: `head ${head}`, unit: "kernel-block", ...tokens, lengthBytes: CELL },
        local: { offsetBytes: head * 4 * CELL, partStrideBytes: CELL },
        remote: { offsetBytes: (2 + head) * CELL, partStrideBytes: 4 * CELL },
      })),
    );
  });

  test("are a head of a token each, whichever side keeps a token's heads together", () => {
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

  test("are all shared heads of a token where both sides keep a token's heads together", () => {
    const tokens = { localParts: 4, remoteParts: 4 };
    const given = shape(nhd(3), nhd(4), { sharedHeads: 2, localHead: 1, remoteHead: 2 });
    expect(seen(directPieces(given, tokens))).toEqual([
      {
        ...{ name: "", unit: "kernel-block", ...tokens, lengthBytes: 2 * CELL },
        local: { offsetBytes: CELL, partStrideBytes: 3 * CELL },
        remote: { offsetBytes: 2 * CELL, partStrideBytes: 4 * CELL },
      },
    ]);
  });

  test.each([
    ["one head here", nhd(1), nhd(4)],
    ["one head there", nhd(4), nhd(1)],
  ])("have no number where one head is shared: %s", (_, local, remote) => {
    const pieces = directPieces(shape(local, remote), { localParts: 4, remoteParts: 4 });
    expect(pieces.map(({ name, lengthBytes }) => [name, lengthBytes])).toEqual([["", CELL]]);
  });
});
