import { DESCRIPTOR_OFFSET, DESCRIPTOR_RUN, type DescriptorPairs, type DescriptorRuns } from "./transport.js";

/** Descriptors one by one, in the order in which they move, from either spelling. For reports and tests: it writes each of them out. */
export function descriptorPairs(descriptors: DescriptorPairs | DescriptorRuns): DescriptorPairs {
  if (descriptors.runs === undefined) return descriptors;
  const { runs, offsets = Int32Array.of(0, 0) } = descriptors;
  const localIds: number[] = [];
  const remoteIds: number[] = [];
  for (let row = 0; row < offsets.length; row += DESCRIPTOR_OFFSET) {
    for (let at = 0; at < runs.length; at += DESCRIPTOR_RUN) {
      const local = (offsets[row] as number) + (runs[at] as number);
      const remote = (offsets[row + 1] as number) + (runs[at + 1] as number);
      for (let step = 0; step < (runs[at + 2] as number); step++) {
        localIds.push(local + step);
        remoteIds.push(remote + step);
      }
    }
  }
  return { localIds: Int32Array.from(localIds), remoteIds: Int32Array.from(remoteIds) };
}
