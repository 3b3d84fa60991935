import { DESCRIPTOR_RUN, type DescriptorPairs, type TransferRequest } from "@kv/interface";

/** What a transfer moves, descriptor by descriptor, in whichever spelling it came. */
export function descriptorPairs(request: TransferRequest): DescriptorPairs {
  if (request.runs === undefined) return request;
  const { runs } = request;
  const local: number[] = [];
  const remote: number[] = [];
  for (let at = 0; at < runs.length; at += DESCRIPTOR_RUN) {
    const [first = 0, theirs = 0, count = 0] = runs.subarray(at, at + DESCRIPTOR_RUN);
    for (let index = 0; index < count; index += 1) {
      local.push(first + index);
      remote.push(theirs + index);
    }
  }
  return { localIds: Int32Array.from(local), remoteIds: Int32Array.from(remote) };
}
