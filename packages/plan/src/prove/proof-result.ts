/** What can be wrong with a plan; a closed list. */
export const PLAN_FAULT_KINDS = [
  // descriptors
  "descriptor-outside",
  "descriptor-lengths",
  "descriptor-step",
  // bytes at the destination
  "foreign-write",
  "written-twice",
  "not-written",
  "wrong-source",
  "lead-not-cleared",
  "tail-not-cleared",
  "needed-but-cleared",
  "receive-pass",
  // copies between a device and the memory that is registered
  "stage",
  // notifications
  "notification-missing",
  "notification-twice",
  "notification-stray",
  "notification-count",
  // the question itself
  "request-tables",
] as const;

export type PlanFaultKind = (typeof PLAN_FAULT_KINDS)[number];

/** The first thing found to be wrong. */
export interface PlanFault {
  readonly kind: PlanFaultKind;
  /** One sentence with what was expected and what was found. */
  readonly message: string;
  /** Where: ranks, region, block, head, token, bytes, as far as they are known. Plain data. */
  readonly at: Readonly<Record<string, string | number>>;
}

/** How much was looked at. */
export interface ProofExtent {
  /** Descriptors that a table can name, over all sources; each was shown to stay within one block. */
  readonly descriptors: number;
  readonly requests: number;
  /** Destination blocks of the requests, region by region. */
  readonly blocks: number;
  /** Patterns of writes within a block that differ; each was followed byte run by byte run. */
  readonly patterns: number;
}

/** `proven`: nothing was found, and `statements` says what that covers. Else the first fault. */
export type ProofResult =
  | {
      readonly proven: true;
      readonly statements: readonly string[];
      /** What the proof takes for granted, such as a conversion that only the engine can do. */
      readonly assumed: readonly string[];
      readonly extent: ProofExtent;
    }
  | { readonly proven: false; readonly fault: PlanFault };

/** Thrown within the prover only, and caught by its entry points. */
export class FoundFault extends Error {
  constructor(readonly fault: PlanFault) {
    super(fault.message);
  }
}

export function fail(kind: PlanFaultKind, message: string, at: PlanFault["at"] = {}): never {
  throw new FoundFault({ kind, message, at });
}
