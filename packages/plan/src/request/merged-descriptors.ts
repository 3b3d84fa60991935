import { addressOf, type DescriptorRow, descriptorRows, rowIndexOf } from "../engine/descriptor-tables.js";
import type { EngineTransferPlan, SourcePlan, TransferList } from "../engine/engine-plan-types.js";
import type { RequestPlan, RequestRead } from "./request-plan-types.js";

/**
 * What remains of a request's descriptors when a transport merges neighbours that are adjacent in memory on both sides (NIXL does). At least
 * as many as there are runs (`runCount`) less those that happen to adjoin: descriptors that follow one another in both lists need not lie
 * side by side: a head's share of a block does not reach the next block's, and padding parts whole blocks.
 */
export function mergedDescriptorCount(
  plan: EngineTransferPlan,
  { reads }: Pick<RequestPlan, "reads">,
): number {
  return reads.reduce((sum, read) => {
    const { lists } = plan.sources[read.sourceIndex] as SourcePlan;
    return sum + mergedOfRead(read, lists[read.listIndex] as TransferList);
  }, 0);
}

/** The same of one read. Within a row of a table neighbours are adjacent where its stride is its length. */
export function mergedOfRead({ runs }: Pick<RequestRead, "runs">, list: TransferList): number {
  const [local, remote] = [descriptorRows(list.localTable), descriptorRows(list.remoteTable)];
  let pieces = 0;
  let localEnd = Number.NaN;
  let remoteEnd = Number.NaN;
  for (let at = 0; at < runs.length; at += 3) {
    let [localId, remoteId, left] = [runs[at] as number, runs[at + 1] as number, runs[at + 2] as number];
    while (left > 0) {
      const [mine, theirs] = [rowAt(local, localId), rowAt(remote, remoteId)];
      const count = Math.min(
        left,
        mine.firstId + mine.count - localId,
        theirs.firstId + theirs.count - remoteId,
      );
      const [to, from] = [addressOf(mine, localId), addressOf(theirs, remoteId)];
      const dense = mine.stride === mine.lengthBytes && theirs.stride === theirs.lengthBytes;
      const goesOn = to === localEnd && from === remoteEnd;
      pieces += (dense ? 1 : count) - (goesOn ? 1 : 0);
      localEnd = addressOf(mine, localId + count - 1) + mine.lengthBytes;
      remoteEnd = addressOf(theirs, remoteId + count - 1) + theirs.lengthBytes;
      localId += count;
      remoteId += count;
      left -= count;
    }
  }
  return pieces;
}

function rowAt(rows: readonly DescriptorRow[], id: number): DescriptorRow {
  return rows[rowIndexOf(rows, id)] as DescriptorRow;
}
