import { createHash } from "node:crypto";
import { PLACES, type Place } from "./life.js";

/** How one process ends. */
export interface Exit {
  readonly place: Place;
  /** The thread that uses NIXL. */
  readonly thread: "main" | "worker";
  /** `return`: the event loop runs empty. `terminate`: the main thread terminates the worker. */
  readonly ending: "return" | "exit" | "terminate";
  /** The time from the place to the end. */
  readonly lingerMs: number;
  /** Loads UCX's InfiniBand module, which can crash a process at exit. */
  readonly infiniband: boolean;
}

export const OUTPUT_BYTES = 1 << 20;

/** The exit with that number. Equal seeds give equal runs. */
export function drawExit(seed: string, number: number): Exit {
  const bytes = createHash("sha256").update(`${seed} ${number}`).digest();
  const pick = <T>(list: readonly T[], at: number): T =>
    list[bytes.readUInt32LE(at) % list.length] as T;
  const thread = pick(["main", "main", "worker"] as const, 0);
  return {
    place: pick(PLACES, 4),
    thread,
    ending: pick(
      thread === "main"
        ? (["return", "exit"] as const)
        : (["return", "exit", "terminate"] as const),
      8,
    ),
    lingerMs: pick([0, 0, 1, 5, 20], 12),
    infiniband: pick([true, false], 16),
  };
}
