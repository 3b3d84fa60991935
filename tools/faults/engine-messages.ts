import type { FaultEngineOrder } from "@kv/testing/faults/fault-fixture";

/** What an engine's process is told to be: its one argument, as JSON. */
export interface EngineProcessOrder extends Omit<FaultEngineOrder, "connector" | "violation"> {
  readonly connector: "pull" | "push";
  readonly seed: string;
  /** Where its side channel listens: at a seat's second start, where the one before did. */
  readonly sideChannelPort: number;
}

/** What an engine's process is asked; each but `abort` and `calm` is answered under its number. */
export interface EngineQuestion {
  readonly number: number;
  readonly ask: "prefill" | "decode" | "abort" | "outstanding" | "counts" | "calm" | "close";
  readonly about?: unknown;
}

/** What it says: where it listens, once; what should never be; answers. */
export type EngineSaying =
  | { readonly says: "ready"; readonly address: { readonly host: string; readonly port: number } }
  | { readonly says: "violation"; readonly what: string }
  | { readonly says: "answer"; readonly number: number; readonly value: unknown }
  | { readonly says: "error"; readonly number: number; readonly code?: string; readonly message: string };
