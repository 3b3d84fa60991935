/** The kinds of faults that a proof finds; a closed list. */
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

/** One of `PLAN_FAULT_KINDS`. */
export type PlanFaultKind = (typeof PLAN_FAULT_KINDS)[number];

/** The first fault of a plan. */
export interface PlanFault {
  /** The kind of fault. */
  readonly kind: PlanFaultKind;
  /** One sentence with the expected and the found value. */
  readonly message: string;
  /** The place: ranks, region, block, head, token, bytes, as far as they are known. Plain data. */
  readonly at: Readonly<Record<string, string | number>>;
}

/** The extent of a proof. */
export interface ProofExtent {
  /** Descriptors of all tables, over all sources. Each stays within one block. */
  readonly descriptors: number;
  /** Requests that were proven. */
  readonly requests: number;
  /** Destination blocks of the requests, counted in each region. */
  readonly blocks: number;
  /** Different patterns of writes within a block. Each was followed byte run by byte run. */
  readonly patterns: number;
}

/** The result of a proof: what is proven, or the first fault. */
export type ProofResult =
  | {
      /** No fault was found. */
      readonly proven: true;
      /** Sentences that say what is proven. */
      readonly statements: readonly string[];
      /** Assumptions of the proof, such as a conversion that only the engine can do. */
      readonly assumed: readonly string[];
      /** The extent of the proof. */
      readonly extent: ProofExtent;
    }
  | {
      /** A fault was found. */
      readonly proven: false;
      /** The first fault. */
      readonly fault: PlanFault;
    };

/** Carries a fault to the entry points of the proof, which catch it. */
export class FoundFault extends Error {
  constructor(readonly fault: PlanFault) {
    super(fault.message);
  }
}

/** Ends the proof with a fault. */
export function fail(kind: PlanFaultKind, message: string, at: PlanFault["at"] = {}): never {
  throw new FoundFault({ kind, message, at });
}
