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
import type { TransferForm } from "./engine-plan-types.js";

export interface FormChoice extends Cuts {
  readonly form: TransferForm;
  readonly reason: string;
}

export interface FormQuestion {
  readonly shapes: readonly AttentionShape[];
  /** The fewest parts into which both sides' kernel blocks divide. */
  readonly parts: BlockParts;
  readonly kernelTokens: { readonly local: number; readonly remote: number };
  /** The tokens within a head are in an order that is known, on both sides. */
  readonly plainTokens: boolean;
  /** The local engine turns received head-major blocks into token-major ones. */
  readonly turnsHeads: boolean;
  /** The receive pass can look at the local memory. */
  readonly canPass: boolean;
  readonly wanted: "permute" | "direct" | undefined;
}

/** Permute or direct, by what the pair can do, and where it can do either by the number of descriptors; errors: `KV_PLAN_UNSUPPORTED`, saying what rules out either. */
export function chooseForm(question: FormQuestion): FormChoice {
  const { shapes, parts, wanted } = question;
  const turned = shapes.filter((shape) => !isPlainCopy(shape, parts));
  if (turned.length === 0) {
    return {
      form: "copy",
      parts,
      tokenByToken: false,
      reason: "the bytes of a block lie in one order on both sides",
    };
  }
  const noPass = whyNoPass(turned, question);
  const noDirect = whyNotDirect(turned, question);
  const coarse: Cuts = { parts, tokenByToken: false };
  const fine: Cuts = turned.some(isTokenByToken)
    ? {
        parts: { localParts: question.kernelTokens.local, remoteParts: question.kernelTokens.remote },
        tokenByToken: true,
      }
    : coarse;
  const permute = { form: "permute", ...coarse } as const;
  const direct = { form: "direct", ...fine } as const;
  if (noPass !== undefined && (noDirect !== undefined || wanted === "permute")) {
    const [one] = turned as [AttentionShape];
    throw unsupported(
      `blocks must be put in another order, and there is no way: a pass cannot, for ${noPass}` +
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
  // Permute is vLLM's form: what is chosen here never has more descriptors.
  const [inPlace, passed] = [descriptorsOf(turned, fine, true), descriptorsOf(turned, coarse, false)];
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

/** Descriptors of a local kernel block, of all its regions. */
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
  if (!canPass) return "the local cache is in device memory, which a pass cannot look at";
  if (turned.some(({ remote }) => remote.heads > 1 && remote.order !== "head-major"))
    return "the remote's blocks are not head-major";
  if (turned.some(({ local }) => local.heads > 1 && local.order !== "head-major") && !turnsHeads)
    return 'token-major blocks are received so only by an engine that declares the conversion "hnd-to-nhd"';
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
  // Then what would lie right by being copied is cut as well.
  return whyNoCells(shapes.flatMap(({ local, remote }) => [local, remote]));
}

/** The pages of hybrids may be padded: where their heads and tokens are is then not known. */
function whyNoCells(sides: readonly AttentionSide[]): string | undefined {
  const odd = sides.find(({ blockBytes, heads, tokens }) => blockBytes % (heads * tokens) !== 0);
  if (odd === undefined) return undefined;
  return `a block of ${odd.blockBytes} bytes does not divide into ${odd.heads} heads of ${odd.tokens} tokens`;
}
