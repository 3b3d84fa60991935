import { createHash } from "node:crypto";
import { PLACES, type Place } from "./life.js";

/** How one process ends. */
export interface Exit {
  readonly place: Place;
  /** Which thread of it uses NIXL. */
  readonly thread: "main" | "worker";
  /** `return`: nothing is left to do. `terminate`: the main thread terminates the worker. */
  readonly ending: "return" | "exit" | "terminate";
  /** From the place to the end. */
  readonly lingerMs: number;
  /** With UCX's module for InfiniBand: what crashes at exit where it is let in. */
  readonly infiniband: boolean;
}

export const OUTPUT_BYTES = 1 << 20;

/** The exit of that number of a run: one seed is one run. */
export function drawExit(seed: string, number: number): Exit {
  const bytes = createHash("sha256").update(`${seed} ${number}`).digest();
  const pick = <T>(list: readonly T[], at: number): T => list[bytes.readUInt32LE(at) % list.length] as T;
  const thread = pick(["main", "main", "worker"] as const, 0);
  return {
    place: pick(PLACES, 4),
    thread,
    ending: pick(
      thread === "main" ? (["return", "exit"] as const) : (["return", "exit", "terminate"] as const),
      8,
    ),
    lingerMs: pick([0, 0, 1, 5, 20], 12),
    infiniband: pick([true, false], 16),
  };
}
