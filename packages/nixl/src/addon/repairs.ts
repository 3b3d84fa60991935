import REPAIR_TEXTS from "./repairs.json" with { type: "json" };

/** A change to what a library of NIXL calls, because the library has a fault. */
export interface RepairDescription {
  /** The library and its faulty versions. */
  readonly of: string;
  readonly fault: string;
  /** What may happen without the repair. */
  readonly without: string;
}

/** By the names that the addon and `KV_NIXL_REPAIRS_OFF` use. */
export const REPAIRS: Readonly<Record<string, RepairDescription>> = REPAIR_TEXTS;
