import { describe, expect, test } from "vitest";
import { refused } from "../refused.test-support.js";
import type { AttentionShape, AttentionSide } from "./pieces.js";
import { chooseForm, type FormQuestion } from "./transfer-form.js";

interface Side extends Partial<AttentionSide> {
  readonly cellBytes?: number;
}

/** One side; default: 2 heads × 4 tokens of 8 bytes, head-major. */
function side({ cellBytes = 8, ...change }: Side = {}): AttentionSide {
  const { heads = 2, tokens = 4 } = change;
  return { heads, tokens, blockBytes: heads * tokens * cellBytes, order: "head-major", ...change };
}
/** All heads of the side with fewer heads are shared. */
function shape(local: Side = {}, remote: Side = {}): AttentionShape {
  const [mine, theirs] = [side(local), side(remote)];
  return {
    local: mine,
    remote: theirs,
    sharedHeads: Math.min(mine.heads, theirs.heads),
    localHead: () => 0,
    remoteHead: 0,
  };
}
const NHD = { order: "token-major" } as const;
const OPAQUE = { order: "opaque" } as const;

/** Blocks of two sizes, head-major. */
const HEADS = shape({}, { tokens: 2 });

const WHOLE = { localParts: 1, remoteParts: 1 };
const HALVES = { localParts: 2, remoteParts: 1 };
const OF_TWO = { localParts: 1, remoteParts: 2 };
/** A local block of four tokens holds two of the remote's. */
const question = (change: Partial<FormQuestion> = {}): FormQuestion => ({
  shapes: [HEADS],
  parts: HALVES,
  tokens: { localParts: 4, remoteParts: 2 },
  plainTokens: true,
  turnsHeads: false,
  canPass: true,
  wanted: undefined,
  ...change,
});
/** Blocks of one size; the local ones are token-major. */
const turned = (change: Partial<FormQuestion> = {}): FormQuestion =>
  question({
    shapes: [shape(NHD)],
    parts: WHOLE,
    tokens: { localParts: 4, remoteParts: 4 },
    ...change,
  });

describe("a copy", () => {
  test.each<[string, Partial<FormQuestion>]>([
    ["when both sides have the same order", { shapes: [shape(), shape(NHD, NHD)], parts: WHOLE }],
    ["even if another form is requested", { shapes: [shape()], parts: WHOLE, wanted: "permute" }],
    [
      "when neither permute nor direct is possible",
      { shapes: [shape(OPAQUE, OPAQUE)], parts: WHOLE, plainTokens: false, canPass: false },
    ],
    ["when parts have one head", { shapes: [shape({ heads: 1 }, { heads: 1, tokens: 2 })] }],
    [
      "of one head in other orders",
      { shapes: [shape({ heads: 1 }, { heads: 1, ...NHD })], parts: WHOLE },
    ],
    ["of a share of head-major blocks", { shapes: [shape({ heads: 1 })], parts: WHOLE }],
    ["of all heads of tokens", { shapes: [shape(NHD, { ...NHD, tokens: 2 })] }],
  ])("%s", (_what, change) => {
    const { parts } = question(change);
    expect(chooseForm(question(change))).toMatchObject({
      form: "copy",
      parts,
      tokenByToken: false,
    });
  });
});

describe("when permute and direct are both possible", () => {
  const form = (...shapes: readonly AttentionShape[]) => chooseForm(question({ shapes }));

  test("chooses permute when direct needs more descriptors, regardless of their size", () => {
    for (const cellBytes of [8, 2 ** 20]) {
      expect(form(shape({ cellBytes }, { tokens: 2, cellBytes }))).toMatchObject({
        form: "permute",
        parts: HALVES,
        tokenByToken: false,
        reason: "descriptors of a block: 2 and a pass, or 4 that land in place",
      });
    }
  });

  test("chooses direct when it needs no more descriptors, as with one shared head", () => {
    expect(form(shape({}, { heads: 1, tokens: 2 }))).toMatchObject({
      form: "direct",
      parts: HALVES,
      reason: "pieces land in place, in no more descriptors than with a pass (2 of a block)",
    });
  });

  test("counts the descriptors of all regions together", () => {
    expect(form(shape({}, { heads: 1, tokens: 2 }), HEADS).form).toBe("permute");
  });

  test("cuts all regions token by token when one region needs it", () => {
    const fine = { localParts: 4, remoteParts: 2 };
    const shapes = [HEADS, shape(NHD, { tokens: 2 })];
    expect(chooseForm(question({ shapes }))).toMatchObject({ form: "direct", parts: fine });
  });

  test("chooses permute when token-by-token pieces need more descriptors", () => {
    const cellBytes = 2 ** 20;
    const asked = turned({
      shapes: [shape({ ...NHD, cellBytes }, { cellBytes })],
      turnsHeads: true,
    });
    expect(chooseForm(asked)).toMatchObject({
      form: "permute",
      parts: WHOLE,
      reason: "descriptors of a block: 1 and a pass, or 8 that land in place",
    });
    expect(chooseForm({ ...asked, wanted: "direct" })).toMatchObject({
      form: "direct",
      parts: { localParts: 4, remoteParts: 4 },
      tokenByToken: true,
    });
  });
});

describe("a pass cannot", () => {
  test.each<[string, FormQuestion, string]>([
    [
      "assemble remote blocks larger than the local ones",
      question({
        shapes: [shape({}, { tokens: 8 })],
        parts: OF_TWO,
        tokens: { localParts: 4, remoteParts: 8 },
      }),
      "not parts of the local ones",
    ],
    ["run on device memory", question({ canPass: false }), "device memory"],
    [
      "read token-major remote blocks",
      turned({ shapes: [shape({}, NHD)] }),
      "remote's blocks are not head-major",
    ],
    ["transpose heads without the hnd-to-nhd conversion", turned(), "hnd-to-nhd"],
    [
      "transpose one of several local regions without hnd-to-nhd",
      question({ shapes: [HEADS, shape(NHD, { tokens: 2 })] }),
      "hnd-to-nhd",
    ],
    [
      "read one token-major remote region of several",
      question({ shapes: [HEADS, shape({}, { ...NHD, tokens: 2 })] }),
      "remote's blocks",
    ],
  ])("%s", (_what, asked, reason) => {
    const choice = chooseForm(asked);
    expect(choice.form).toBe("direct");
    expect(choice.reason).toMatch(reason);
    expect(chooseForm({ ...asked, wanted: "direct" })).toMatchObject({
      form: "direct",
      reason: "asked for",
    });
    expect(() => chooseForm({ ...asked, wanted: "permute" })).toThrow(reason);
  });

  test("reorder heads, which blocks of one head do not need", () => {
    const one = { heads: 1, ...OPAQUE };
    const asked = question({ shapes: [shape(one, { ...one, tokens: 2 })], wanted: "permute" });
    expect(chooseForm(asked)).toMatchObject({ form: "permute", reason: "asked for" });
  });
});

describe("finer descriptors cannot", () => {
  test.each<[string, FormQuestion, string]>([
    [
      "cut a local layout that spreads heads",
      question({ shapes: [shape({ heads: 1, ...OPAQUE }, { heads: 1, tokens: 2 })] }),
      "spreads the heads",
    ],
    [
      "cut a remote layout that spreads heads",
      question({ shapes: [HEADS, shape({}, { heads: 1, tokens: 2, ...OPAQUE })] }),
      "spreads the heads",
    ],
    [
      "cut remote blocks that do not divide into cells",
      question({ shapes: [shape({}, { tokens: 2, blockBytes: 33 })] }),
      "33 bytes does not divide into 2 heads of 2 tokens",
    ],
    [
      "cut another region that does not divide into tokens",
      question({
        shapes: [
          shape(NHD, { tokens: 2 }),
          shape({ heads: 1, blockBytes: 34 }, { heads: 1, tokens: 2 }),
        ],
        turnsHeads: true,
      }),
      "34 bytes does not divide into 1 heads of 4 tokens",
    ],
    [
      "cut a region shared by groups with different tokens per block",
      question({ shapes: [{ ...HEADS, isMixed: true }] }),
      "groups with different tokens",
    ],
  ])("%s", (_what, asked, reason) => {
    const choice = chooseForm(asked);
    expect(choice).toMatchObject({ form: "permute", parts: HALVES });
    expect(choice.reason).toMatch(reason);
    expect(chooseForm({ ...asked, wanted: "direct" })).toMatchObject({
      form: "permute",
      reason: choice.reason,
    });
    expect(chooseForm({ ...asked, wanted: "permute" })).toMatchObject({
      form: "permute",
      reason: "asked for",
    });
  });
});

describe("a padded page that can be copied", () => {
  const padded = shape({ heads: 1, blockBytes: 34 }, { heads: 1, tokens: 2, blockBytes: 34 });
  const direct = (...shapes: readonly AttentionShape[]) =>
    chooseForm(question({ shapes: [...shapes, padded], canPass: false, wanted: "direct" }));

  test("allows direct when no region is cut token by token", () => {
    expect(direct(HEADS)).toMatchObject({ form: "direct", parts: HALVES, tokenByToken: false });
  });

  test("prevents direct when one region is cut token by token", () => {
    expect(() => direct(HEADS, shape(NHD, { tokens: 2 }))).toThrow("34 bytes does not divide");
  });
});

describe("neither form can", () => {
  test.each<[string, FormQuestion, string]>([
    [
      "cut blocks with an unknown token order",
      question({ plainTokens: false }),
      "a pass cannot, for the order of tokens within a head is the backend's own; finer descriptors cannot, for the order",
    ],
    [
      "cut a padded page",
      question({ shapes: [shape({ blockBytes: 66 }, { tokens: 2, blockBytes: 33 })] }),
      "pass cannot, for a block of 66 bytes does not divide into 2 heads of 4 tokens; finer descriptors cannot, for a block of 66 bytes",
    ],
  ])("%s", (_what, asked, message) => {
    refused(() => chooseForm(asked), "KV_PLAN_UNSUPPORTED", message);
  });
});
