import type { FaultEngineOrder } from "@kv/testing/faults/fault-fixture";

/** The options of an engine's process: its only argument, as JSON. */
export interface EngineProcessOptions extends Omit<FaultEngineOrder, "connector" | "violation"> {
  readonly connector: "pull" | "push";
  readonly seed: string;
  /** Where its side channel listens. An engine that is restarted listens on the port of its predecessor. */
  readonly sideChannelPort: number;
}

/** A command to an engine's process. All except `abort` and `stopFaults` are answered with the command's number. */
export interface EngineCommand {
  readonly number: number;
  readonly name: "prefill" | "decode" | "abort" | "outstanding" | "counts" | "stopFaults" | "close";
  readonly argument?: unknown;
}

/** A message of the engine's process: its address, sent once; a violated invariant; the answer to a command. */
export type EngineMessage =
  | { readonly kind: "ready"; readonly address: { readonly host: string; readonly port: number } }
  | { readonly kind: "violation"; readonly what: string }
  | { readonly kind: "answer"; readonly number: number; readonly value: unknown }
  | { readonly kind: "error"; readonly number: number; readonly code?: string; readonly message: string };
