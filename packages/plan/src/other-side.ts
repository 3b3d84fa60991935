import { DESCRIPTOR_RUN, type DescriptorPairs, type DescriptorRuns } from "@kv/interface";

/** The same descriptors as the peer names them: what is local to one side is remote to the other. */
export function fromOtherSide(
  descriptors: DescriptorPairs | DescriptorRuns,
): DescriptorPairs | DescriptorRuns {
  if (descriptors.runs === undefined) {
    return { localIds: descriptors.remoteIds, remoteIds: descriptors.localIds };
  }
  return { runs: turnedRuns(descriptors.runs) };
}

/** Rows `[localId, remoteId, count]` with the two ids exchanged. */
export function turnedRuns(runs: Int32Array): Int32Array {
  const out = runs.slice();
  for (let at = 0; at < out.length; at += DESCRIPTOR_RUN) {
    out[at] = runs[at + 1] as number;
    out[at + 1] = runs[at] as number;
  }
  return out;
}
