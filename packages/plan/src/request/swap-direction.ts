import { DESCRIPTOR_OFFSET, DESCRIPTOR_RUN, type DescriptorPairs, type DescriptorRuns } from "@kv/interface";

/** The same descriptors as the peer names them: what is local to one side is remote to the other. */
export function swapDirection(
  descriptors: DescriptorPairs | DescriptorRuns,
): DescriptorPairs | DescriptorRuns {
  if (descriptors.runs === undefined) {
    return { localIds: descriptors.remoteIds, remoteIds: descriptors.localIds };
  }
  const { runs, offsets } = descriptors;
  if (offsets === undefined) return { runs: swapRuns(runs) };
  return { runs: swapRuns(runs), offsets: turned(offsets, DESCRIPTOR_OFFSET) };
}

/** Rows `[localId, remoteId, count]` with the two ids exchanged. */
function swapRuns(runs: Int32Array): Int32Array {
  return turned(runs, DESCRIPTOR_RUN);
}

/** Rows of so many numbers, the first two of each exchanged. */
function turned(rows: Int32Array, perRow: number): Int32Array {
  const out = rows.slice();
  for (let at = 0; at < out.length; at += perRow) {
    out[at] = rows[at + 1] as number;
    out[at + 1] = rows[at] as number;
  }
  return out;
}
