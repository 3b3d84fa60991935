import { KvError } from "@kv/interface";

/** Refuses what is not an integer of at least `minimum`; names the field and the value. */
export function requireInteger(name: string, value: number, minimum: number): void {
  if (Number.isSafeInteger(value) && value >= minimum) return;
  throw new KvError(
    "KV_TOPOLOGY_INVALID",
    `${name} must be an integer of at least ${minimum}, got ${value}`,
    {
      details: { name, value, minimum },
    },
  );
}

/** Refuses a rank that is not below its size. */
export function requireRank(name: string, rank: number, sizeName: string, size: number): void {
  requireInteger(sizeName, size, 1);
  requireInteger(name, rank, 0);
  if (rank < size) return;
  throw new KvError("KV_TOPOLOGY_INVALID", `${name} ${rank} is not below ${sizeName} ${size}`, {
    details: { [name]: rank, [sizeName]: size },
  });
}
