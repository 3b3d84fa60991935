import { KvError, type KvErrorCode } from "@kv/interface";
import type { SeededRandom } from "../simulation/seeded-random.js";

/** What can go wrong: a transfer, a notification (riders too), or a request on the side channel. */
export type FaultOperation = "READ" | "WRITE" | "NOTIFY" | "REQUEST";

export type FaultKind =
  /** A transfer that never ends by itself; a notification or a request that is lost. */
  | "drop"
  /** A notification that arrives twice. */
  | "duplicate"
  /** `delayMs` more; notifications behind it wait for it. */
  | "delay"
  /** A notification that those behind it overtake, for `delayMs`. */
  | "reorder"
  /** The two hosts lose each other from now on, or for `forMs`. */
  | "disconnect"
  /** A transfer that fails when part of its bytes have landed; a notification or a request that is refused. */
  | "fail"
  /** A reply on the side channel whose bytes are noise. */
  | "garbage";

/** One operation, as a rule sees it. */
export interface FaultSubject {
  readonly operation: FaultOperation;
  /** Host and agent that began it; the side channel has no agents. */
  readonly from: string;
  readonly fromAgent?: string;
  readonly to: string;
  readonly toAgent?: string;
  readonly lengthBytes: number;
  /** Of a notification. */
  readonly payload?: Uint8Array;
}

/** Which operations go wrong, and how. The first rule that matches an operation decides; each operation has one fault at most. */
export interface FaultRule {
  readonly fault: FaultKind;
  readonly operation?: FaultOperation | readonly FaultOperation[];
  /** Name of the host or of the agent that begins the operation. */
  readonly from?: string;
  readonly to?: string;
  readonly where?: (subject: FaultSubject) => boolean;
  /** Only the n-th operation that matches, counted from 1. */
  readonly nth?: number;
  /** The chance of each operation that matches; 1 by default. */
  readonly probability?: number;
  /** Ends the rule after so many faults. */
  readonly times?: number;
  /** For `delay` and `reorder`; 10 by default. */
  readonly delayMs?: number;
  /** For `disconnect`; without it the hosts stay apart until `reconnect`. */
  readonly forMs?: number;
  /** For `fail` of a transfer; `KV_TRANSFER_FAILED` by default. */
  readonly code?: KvErrorCode;
}

const CAN_SUFFER: Readonly<Record<FaultKind, readonly FaultOperation[]>> = {
  drop: ["READ", "WRITE", "NOTIFY", "REQUEST"],
  duplicate: ["NOTIFY"],
  delay: ["READ", "WRITE", "NOTIFY", "REQUEST"],
  reorder: ["NOTIFY"],
  disconnect: ["READ", "WRITE", "NOTIFY", "REQUEST"],
  fail: ["READ", "WRITE", "NOTIFY", "REQUEST"],
  garbage: ["REQUEST"],
};

export const DEFAULT_FAULT_DELAY_MS = 10;

export interface FaultPlan {
  decide(subject: FaultSubject): FaultRule | undefined;
  /** Takes the place of all rules; counters of `nth` and `times` begin anew. */
  setRules(rules: readonly FaultRule[]): void;
  /** Faults so far, by kind. */
  counts(): Readonly<Partial<Record<FaultKind, number>>>;
}

/** The same seed and the same operations in the same order give the same faults. */
export function faultPlan(rules: readonly FaultRule[], random: SeededRandom): FaultPlan {
  let active: ActiveRule[] = rules.map(activate);
  const counts: Partial<Record<FaultKind, number>> = {};
  return {
    decide(subject) {
      for (const entry of active) {
        if (!matches(entry, subject)) continue;
        entry.matched += 1;
        const { nth, probability, times, fault } = entry.rule;
        if (nth !== undefined && entry.matched !== nth) continue;
        if (probability !== undefined && random.next() >= probability) continue;
        if (times !== undefined && entry.injected >= times) continue;
        entry.injected += 1;
        counts[fault] = (counts[fault] ?? 0) + 1;
        return entry.rule;
      }
      return undefined;
    },
    setRules(next) {
      active = next.map(activate);
    },
    counts: () => ({ ...counts }),
  };
}

interface ActiveRule {
  readonly rule: FaultRule;
  readonly operations: readonly FaultOperation[];
  matched: number;
  injected: number;
}

function activate(rule: FaultRule): ActiveRule {
  const possible = CAN_SUFFER[rule.fault] as readonly FaultOperation[] | undefined;
  if (possible === undefined) throw invalid(`fault ${JSON.stringify(rule.fault)} is unknown`);
  const named = rule.operation === undefined ? possible : [rule.operation].flat();
  for (const operation of named) {
    if (!possible.includes(operation)) {
      throw invalid(`fault "${rule.fault}" cannot befall a ${operation}, only ${possible.join(", ")}`);
    }
  }
  const { probability, nth, times, delayMs, forMs } = rule;
  if (probability !== undefined && !(probability >= 0 && probability <= 1)) {
    throw invalid(`probability ${probability} is not between 0 and 1`);
  }
  for (const [name, value] of Object.entries({ nth, times })) {
    if (value !== undefined && !(Number.isSafeInteger(value) && value >= 1)) {
      throw invalid(`${name} ${value} is not a whole number from 1 on`);
    }
  }
  for (const [name, value] of Object.entries({ delayMs, forMs })) {
    if (value !== undefined && !(value >= 0)) throw invalid(`${name} ${value} is not a time`);
  }
  return { rule, operations: named, matched: 0, injected: 0 };
}

function matches({ rule, operations }: ActiveRule, subject: FaultSubject): boolean {
  if (!operations.includes(subject.operation)) return false;
  if (rule.from !== undefined && rule.from !== subject.from && rule.from !== subject.fromAgent) return false;
  if (rule.to !== undefined && rule.to !== subject.to && rule.to !== subject.toAgent) return false;
  return rule.where === undefined || rule.where(subject);
}

function invalid(message: string): KvError {
  return new KvError("KV_CONFIG_INVALID", `a fault rule of the memory network: ${message}`);
}
