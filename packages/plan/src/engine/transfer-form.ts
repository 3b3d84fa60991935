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
  type TransferForm,
} from "./pieces.js";

export interface FormChoice extends Cuts {
  readonly form: TransferForm;
  readonly reason: string;
}

export interface FormQuestion {
  readonly shapes: readonly AttentionShape[];
  readonly parts: BlockParts;
  /** The parts of kernel blocks that are cut token by token. */
  readonly tokens: BlockParts;
  readonly plainTokens: boolean;
  readonly turnsHeads: boolean;
  readonly canPass: boolean;
  readonly wanted: "permute" | "direct" | undefined;
}

/**
 * Chooses `copy` where orders agree; else `permute` or `direct`, by what the pair supports, then by
 * descriptors.
 * @throws `KV_PLAN_UNSUPPORTED` with the reasons that exclude both forms.
 */
export function chooseForm(question: FormQuestion): FormChoice {
  const { shapes, parts, wanted, tokens } = question;
  const turned = shapes.filter((shape) => !isPlainCopy(shape, parts));
  const coarse: Cuts = { parts, tokenByToken: false };
  if (turned.length === 0) {
    const reason = "the bytes of a block have the same order on both sides";
    return { form: "copy", ...coarse, reason };
  }
  const noPass = whyNoPass(turned, question);
  const noDirect = whyNotDirect(turned, question);
  const fine = turned.some(isTokenByToken) ? { parts: tokens, tokenByToken: true } : coarse;
  const permute = (reason: string): FormChoice => ({ form: "permute", ...coarse, reason });
  const direct = (reason: string): FormChoice => ({ form: "direct", ...fine, reason });
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
  if (wanted === "permute") return permute("asked for");
  if (wanted === "direct" && noDirect === undefined) return direct("asked for");
  if (noPass !== undefined) return direct(noPass);
  if (noDirect !== undefined) return permute(noDirect);
  // vLLM permutes. The chosen form never has more descriptors.
  const inPlace = descriptorsOf(turned, fine, true);
  const passed = descriptorsOf(turned, coarse, false);
  return inPlace <= passed
    ? direct(
        `pieces land in place, in no more descriptors than with a pass (${inPlace} of a block)`,
      )
    : permute(`descriptors of a block: ${passed} and a pass, or ${inPlace} that land in place`);
}

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

/** A hybrid's page may be padded, which hides the places of heads and tokens. */
function whyNoCells(sides: readonly AttentionSide[]): string | undefined {
  const odd = sides.find(({ blockBytes, heads, tokens }) => blockBytes % (heads * tokens) !== 0);
  if (odd === undefined) return undefined;
  return `a block of ${odd.blockBytes} bytes does not divide into ${odd.heads} heads of ${odd.tokens} tokens`;
}
