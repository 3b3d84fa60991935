import { KvError } from "@kv/interface";

/**
 * Throws `KV_TOPOLOGY_INVALID` unless `value` is an integer of at least `minimum`. The error has
 * the field's name and the value.
 */
export function requireInteger(name: string, value: number, minimum: number): void {
  if (Number.isSafeInteger(value) && value >= minimum) return;
  throw new KvError(
    "KV_TOPOLOGY_INVALID",
    `${name} must be an integer of at least ${minimum}, got ${value}`,
    { details: { name, value, minimum } },
  );
}

/** Throws `KV_TOPOLOGY_INVALID` unless `rank` is an integer from 0 to `size` - 1. */
export function requireRank(name: string, rank: number, sizeName: string, size: number): void {
  requireInteger(sizeName, size, 1);
  requireInteger(name, rank, 0);
  if (rank < size) return;
  throw new KvError("KV_TOPOLOGY_INVALID", `${name} ${rank} is not below ${sizeName} ${size}`, {
    details: { [name]: rank, [sizeName]: size },
  });
}
