import {
  DESCRIPTOR_OFFSET,
  DESCRIPTOR_RUN,
  type DescriptorPairs,
  type DescriptorRuns,
} from "@kv/interface";

/**
 * Exchanges the local and the remote ids of descriptors. A producer that pushes plans the read of
 * its consumer and swaps it, to post it as a write.
 */
export function swapDirection(
  descriptors: DescriptorPairs | DescriptorRuns,
): DescriptorPairs | DescriptorRuns {
  if (descriptors.runs === undefined) {
    return { localIds: descriptors.remoteIds, remoteIds: descriptors.localIds };
  }
  const { runs, offsets } = descriptors;
  if (offsets === undefined) return { runs: swapRuns(runs) };
  return { runs: swapRuns(runs), offsets: swapColumns(offsets, DESCRIPTOR_OFFSET) };
}

/** Rows `[localId, remoteId, count]` with the two ids exchanged. */
function swapRuns(runs: Int32Array): Int32Array {
  return swapColumns(runs, DESCRIPTOR_RUN);
}

/** Rows of `perRow` numbers, with the first two of each exchanged. */
function swapColumns(rows: Int32Array, perRow: number): Int32Array {
  const out = rows.slice();
  for (let at = 0; at < out.length; at += perRow) {
    out[at] = rows[at + 1] as number;
    out[at + 1] = rows[at] as number;
  }
  return out;
}
