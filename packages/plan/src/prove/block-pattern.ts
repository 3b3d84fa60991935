import type { EngineTransferPlan } from "../engine-plan-types.js";
import { type BlockMeaning, placeAt } from "./block-meaning.js";
import { type BlockPass, originOf, zeroingAt } from "./pass-effect.js";
import { fail, type PlanFault } from "./verdict.js";

/** One descriptor's bytes as they land in a block of the destination. */
export interface Write {
  readonly offset: number;
  readonly lengthBytes: number;
  readonly source: number;
  readonly remoteOffset: number;
  /** First token of the remote block that is read, counted from the first token of the destination block. */
  readonly remoteToken: number;
}

/** All that decides whether a destination block ends up right. Blocks with equal patterns share one proof. */
export interface BlockPattern {
  readonly lengthBytes: number;
  readonly writes: readonly Write[];
  readonly pass: BlockPass;
  /** Tokens of the block, from its begin, that the request needs. */
  readonly neededTokens: number;
  readonly meaning: BlockMeaning;
  /** Of a block at each source, by its position in the plan. */
  readonly sourceMeanings: readonly BlockMeaning[];
}

export function patternKey(pattern: BlockPattern): string {
  let key = `${pattern.lengthBytes};${pattern.neededTokens};${pattern.pass.permuted};${pattern.pass.zeroFromToken}`;
  for (const write of pattern.writes)
    key += `;${write.offset},${write.lengthBytes},${write.source},${write.remoteOffset},${write.remoteToken}`;
  return key;
}

/** Follows every byte of the finished block back to its source, a run at a time. `where` completes the fault. */
export function provePattern(plan: EngineTransferPlan, pattern: BlockPattern, where: PlanFault["at"]): void {
  const { meaning, pass } = pattern;
  const writes = [...pattern.writes].sort((one, two) => one.offset - two.offset);
  for (const [index, write] of writes.entries()) {
    const before = writes[index - 1];
    if (before === undefined || before.offset + before.lengthBytes <= write.offset) continue;
    fail("written-twice", `bytes from ${write.offset} of the block are written by two descriptors`, {
      ...where,
      offset: write.offset,
    });
  }
  for (let offset = 0; offset < pattern.lengthBytes; ) {
    const want = placeAt(meaning, offset);
    const zeroing = zeroingAt(plan, pattern.lengthBytes, offset, pass.zeroFromToken);
    const at = { ...where, offset, head: want.head, tokenInBlock: want.token, cellByte: want.cellByte };
    const cellRest = meaning.cellBytes - want.cellByte;
    if (want.token + meaning.tokensPerStep > pattern.neededTokens) {
      if (!zeroing.zeroed && plan.uncovered === "zeroed") {
        fail("tail-not-cleared", "a token that the request does not have keeps the bytes of another", at);
      }
    }
    if (want.token >= pattern.neededTokens) {
      offset += Math.min(zeroing.runBytes, want.runAxis === "token" ? want.runBytes : cellRest);
      continue;
    }
    if (zeroing.zeroed)
      fail("needed-but-cleared", "the receive pass zeroes a token that the request needs", at);
    const origin = pass.permuted
      ? originOf(plan, pattern.lengthBytes, offset)
      : { offset, runBytes: pattern.lengthBytes - offset };
    const write = writeAt(writes, origin.offset);
    if (write === undefined) {
      fail("not-written", "nothing is written to a byte that the request needs", {
        ...at,
        landed: origin.offset,
      });
    }
    const into = origin.offset - write.offset;
    const source = pattern.sourceMeanings[write.source];
    if (source === undefined) fail("wrong-source", `source ${write.source} is not in the plan`, at);
    const got = placeAt(source, write.remoteOffset + into);
    const gotToken = got.token + write.remoteToken;
    const same =
      got.head === want.head &&
      gotToken === want.token &&
      got.cellByte === want.cellByte &&
      source.cellBytes === meaning.cellBytes &&
      source.inside === meaning.inside;
    if (!same) {
      fail(
        "wrong-source",
        `head ${want.head}, token ${want.token} of the block, byte ${want.cellByte} (${meaning.inside}, cells of ${meaning.cellBytes}) ` +
          `comes from head ${got.head}, token ${gotToken}, byte ${got.cellByte} (${source.inside}, cells of ${source.cellBytes})`,
        { ...at, source: write.source, remoteOffset: write.remoteOffset + into },
      );
    }
    const together = want.runAxis === got.runAxis ? Math.min(want.runBytes, got.runBytes) : cellRest;
    // A run of tokens ends where the request does.
    const left =
      want.runAxis === "token" ? Math.ceil((pattern.neededTokens - want.token) / meaning.tokensPerStep) : 1;
    const untilEnd = want.runAxis === "head" ? together : left * meaning.cellBytes - want.cellByte;
    offset += Math.min(together, untilEnd, zeroing.runBytes, origin.runBytes, write.lengthBytes - into);
  }
}

function writeAt(writes: readonly Write[], offset: number): Write | undefined {
  let [low, high] = [0, writes.length - 1];
  while (low <= high) {
    const middle = (low + high) >> 1;
    const write = writes[middle] as Write;
    if (offset < write.offset) high = middle - 1;
    else if (offset >= write.offset + write.lengthBytes) low = middle + 1;
    else return write;
  }
  return undefined;
}
