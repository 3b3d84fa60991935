import type { EngineTransferPlan } from "../engine/engine-plan.js";
import { mismatch, type RequestBlocks } from "./request-checks.js";

/**
 * By group: blocks at the end of the remote's list that lie behind its last token, such as vLLM's
 * look-ahead for speculative decoding. A list of the whole sequence shows them by its length. A
 * window's list is cut to one length, so their number follows from the tokens for which the remote
 * has blocks in a group of the whole sequence; a model without such a group does not show them.
 *
 * @throws `KV_BLOCKS_MISMATCH` where groups with blocks of other sizes leave it open.
 */
export function lookAheadBlocks(
  plan: EngineTransferPlan,
  { remoteBlockIds, numTokens }: RequestBlocks,
): readonly number[] {
  const none = plan.groupPlans.map(() => 0);
  if (numTokens === undefined || !plan.groupPlans.some(({ extent }) => extent === "window"))
    return none;
  // The remote has blocks for more than `over` and at most `upTo` tokens.
  let [over, upTo] = [0, Number.POSITIVE_INFINITY];
  for (const [group, { extent, remoteBlockTokens }] of plan.groupPlans.entries()) {
    const held = remoteBlockIds[group]?.length ?? 0;
    if (extent !== "sequence" || held <= Math.ceil(numTokens / remoteBlockTokens)) continue;
    over = Math.max(over, (held - 1) * remoteBlockTokens);
    upTo = Math.min(upTo, held * remoteBlockTokens);
  }
  if (over === 0) return none;
  return plan.groupPlans.map(({ extent, remoteBlockTokens }, group) => {
    const held = remoteBlockIds[group]?.length ?? 0;
    if (extent !== "window" || held === 0) return 0;
    const [least, most] = [
      Math.ceil((over + 1) / remoteBlockTokens),
      Math.ceil(upTo / remoteBlockTokens),
    ];
    const extra = most - Math.ceil(numTokens / remoteBlockTokens);
    if (least === most && extra < held) return extra;
    throw mismatch(
      `group ${group}: the remote has blocks for more than the ${numTokens} tokens that it announced, and which of the ${held} blocks of this window ` +
        `lie behind them is open: it has blocks for ${over + 1} to ${upTo} tokens, and ${remoteBlockTokens} tokens in a block of this group`,
      { group, remoteBlocks: held, numTokens, over, upTo },
    );
  });
}
