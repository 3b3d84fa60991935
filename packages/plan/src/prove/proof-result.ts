/** The kinds of faults that a proof finds; a closed list. */
export const PLAN_FAULT_KINDS = [
  "descriptor-outside",
  "descriptor-lengths",
  "descriptor-step",
  "foreign-write",
  "written-twice",
  "not-written",
  "wrong-source",
  "lead-not-cleared",
  "tail-not-cleared",
  "needed-but-cleared",
  "receive-pass",
  "stage",
  "notification-missing",
  "notification-twice",
  "notification-stray",
  "notification-count",
  "request-tables",
] as const;

/** One of `PLAN_FAULT_KINDS`. */
export type PlanFaultKind = (typeof PLAN_FAULT_KINDS)[number];

/** The first fault of a plan. */
export interface PlanFault {
  readonly kind: PlanFaultKind;
  /** One sentence with the expected and the found value. */
  readonly message: string;
  /** The fault's place, as far as known. Plain data. */
  readonly at: Readonly<Record<string, string | number>>;
}

/** The extent of a proof. */
export interface ProofExtent {
  /** Descriptors of all tables, over all sources. */
  readonly descriptors: number;
  readonly requests: number;
  /** Destination blocks, counted in each region. */
  readonly blocks: number;
  /** Different patterns of writes within a block. */
  readonly patterns: number;
}

/** The result of a proof: what is proven, or the first fault. */
export type ProofResult =
  | {
      readonly proven: true;
      /** What is proven, in sentences. */
      readonly statements: readonly string[];
      /** What the proof assumes, such as a conversion that only the engine can do. */
      readonly assumed: readonly string[];
      readonly extent: ProofExtent;
    }
  | {
      readonly proven: false;
      readonly fault: PlanFault;
    };

export class FoundFault extends Error {
  constructor(readonly fault: PlanFault) {
    super(fault.message);
  }
}

export function fail(kind: PlanFaultKind, message: string, at: PlanFault["at"] = {}): never {
  throw new FoundFault({ kind, message, at });
}
