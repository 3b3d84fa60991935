import {
  addressOf,
  type DescriptorRow,
  descriptorRows,
  rowIndexOf,
} from "../engine/descriptor-tables.js";
import type { TransferList } from "../engine/engine-plan-types.js";
import type { RequestRead } from "../request/request-plan-types.js";

/**
 * The number of descriptors of a read that remain when a transport merges neighbours that are
 * adjacent in memory on both sides, as NIXL does. Within a row of a table neighbours are adjacent
 * where the stride equals the length: a head's share of a block does not reach the next block's
 * share, and padding parts whole blocks.
 */
export function mergedDescriptorCount(
  { runs }: Pick<RequestRead, "runs">,
  list: TransferList,
): number {
  const [local, remote] = [descriptorRows(list.localTable), descriptorRows(list.remoteTable)];
  let pieces = 0;
  let localEnd = Number.NaN;
  let remoteEnd = Number.NaN;
  for (let at = 0; at < runs.length; at += 3) {
    let [localId, remoteId, left] = [
      runs[at] as number,
      runs[at + 1] as number,
      runs[at + 2] as number,
    ];
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
