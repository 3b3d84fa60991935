import { unsupported } from "../errors.js";
import {
  type AttentionShape,
  type AttentionSide,
  type BlockParts,
  type Cuts,
  directPieces,
  isPlainCopy,
  isTokenByToken,
  partsOfShape,
} from "./attention-pieces.js";

/**
 * How bytes get into the order of the local cache. `copy`: every descriptor's bytes land in their
 * final place. `permute`: the remote's smaller blocks land one after another within the local
 * block, and the receive pass puts heads and tokens in order. `direct`: block sizes or orders
 * differ, and blocks are cut into pieces that land in their final place, without a pass.
 */
export type TransferForm = "copy" | "permute" | "direct";

/** The chosen form, and the cuts of blocks in it. */
export interface FormChoice extends Cuts {
  readonly form: TransferForm;
  readonly reason: string;
}

/** The facts that decide on a form. */
export interface FormQuestion {
  readonly shapes: readonly AttentionShape[];
  readonly parts: BlockParts;
  readonly kernelTokens: { readonly local: number; readonly remote: number };
  readonly plainTokens: boolean;
  /**
   * The pair has the conversion "hnd-to-nhd": head-major blocks become token-major ones after a
   * receive.
   */
  readonly turnsHeads: boolean;
  readonly canPass: boolean;
  readonly wanted: "permute" | "direct" | undefined;
}

/**
 * Chooses the form. `copy` where bytes already lie in one order; else `permute` or `direct`, by
 * what the pair supports, and by the number of descriptors where it supports both.
 * @throws `KV_PLAN_UNSUPPORTED` with the reasons that exclude both forms.
 */
export function chooseForm(question: FormQuestion): FormChoice {
  const { shapes, parts, wanted } = question;
  const turned = shapes.filter((shape) => !isPlainCopy(shape, parts));
  if (turned.length === 0) {
    return {
      form: "copy",
      parts,
      tokenByToken: false,
      reason: "the bytes of a block have the same order on both sides",
    };
  }
  const noPass = whyNoPass(turned, question);
  const noDirect = whyNotDirect(turned, question);
  const coarse: Cuts = { parts, tokenByToken: false };
  const fine: Cuts = turned.some(isTokenByToken)
    ? {
        parts: {
          localParts: question.kernelTokens.local,
          remoteParts: question.kernelTokens.remote,
        },
        tokenByToken: true,
      }
    : coarse;
  const permute = { form: "permute", ...coarse } as const;
  const direct = { form: "direct", ...fine } as const;
  if (noPass !== undefined && (noDirect !== undefined || wanted === "permute")) {
    const [one] = turned as [AttentionShape];
    throw unsupported(
      `blocks must be put in another order, and neither form can: a pass cannot, for ${noPass}` +
        (noDirect === undefined ? "" : `; finer descriptors cannot, for ${noDirect}`),
      `${one.local.heads} heads × ${one.local.tokens} tokens, ${one.local.order}`,
      `${one.remote.heads} heads × ${one.remote.tokens} tokens, ${one.remote.order}`,
      "use equal block sizes and one layout on both sides, or stage the cache through host memory",
    );
  }
  if (wanted === "permute") return { ...permute, reason: "asked for" };
  if (wanted === "direct" && noDirect === undefined) return { ...direct, reason: "asked for" };
  if (noPass !== undefined) return { ...direct, reason: noPass };
  if (noDirect !== undefined) return { ...permute, reason: noDirect };
  // Permute is the form of vLLM. The chosen form never has more descriptors.
  const [inPlace, passed] = [
    descriptorsOf(turned, fine, true),
    descriptorsOf(turned, coarse, false),
  ];
  return inPlace <= passed
    ? {
        ...direct,
        reason: `pieces land in place, in no more descriptors than with a pass (${inPlace} of a block)`,
      }
    : {
        ...permute,
        reason: `descriptors of a block: ${passed} and a pass, or ${inPlace} that land in place`,
      };
}

/** Descriptors of a local kernel block over all regions. */
function descriptorsOf(shapes: readonly AttentionShape[], cuts: Cuts, direct: boolean): number {
  return shapes.reduce((sum, shape) => {
    const parts = partsOfShape(cuts, shape);
    return sum + (direct ? directPieces(shape, parts).length : 1) * parts.localParts;
  }, 0);
}

function whyNoPass(
  turned: readonly AttentionShape[],
  { plainTokens, turnsHeads, canPass, parts }: FormQuestion,
): string | undefined {
  if (!plainTokens) return "the order of tokens within a head is the backend's own";
  if (parts.remoteParts > 1) return "the remote's blocks are not parts of the local ones";
  if (!canPass) return "the local cache is in device memory, which a pass cannot access";
  if (turned.some(({ remote }) => remote.heads > 1 && remote.order !== "head-major"))
    return "the remote's blocks are not head-major";
  if (turned.some(({ local }) => local.heads > 1 && local.order !== "head-major") && !turnsHeads)
    return 'only an engine that declares the conversion "hnd-to-nhd" receives token-major blocks with a pass';
  return whyNoCells(turned.map(({ local }) => local));
}

function whyNotDirect(
  turned: readonly AttentionShape[],
  { shapes, plainTokens }: FormQuestion,
): string | undefined {
  if (!plainTokens) return "the order of tokens within a head is the backend's own";
  for (const { local, remote, isMixed } of turned) {
    if (local.order === "opaque" || remote.order === "opaque")
      return "the layout spreads the heads of a block over memory";
    const noCells = whyNoCells([local, remote]);
    if (noCells !== undefined) return noCells;
    if (isMixed) return "groups with different tokens or heads per block share a region";
  }
  if (!turned.some(isTokenByToken)) return undefined;
  // Token by token, regions that a plain copy would serve are cut as well.
  return whyNoCells(shapes.flatMap(({ local, remote }) => [local, remote]));
}

/** The pages of hybrids may be padded; then the places of their heads and tokens are unknown. */
function whyNoCells(sides: readonly AttentionSide[]): string | undefined {
  const odd = sides.find(({ blockBytes, heads, tokens }) => blockBytes % (heads * tokens) !== 0);
  if (odd === undefined) return undefined;
  return `a block of ${odd.blockBytes} bytes does not divide into ${odd.heads} heads of ${odd.tokens} tokens`;
}
