import { DESCRIPTOR_RUN, type TransferRequest } from "@kv/interface";

/** How many a transfer moves, in either spelling. */
export function descriptorCount({ runs, localIds }: TransferRequest): number {
  if (runs === undefined) return localIds.length;
  return runs.reduce((sum, value, at) => (at % DESCRIPTOR_RUN === DESCRIPTOR_RUN - 1 ? sum + value : sum), 0);
}
