import { KvError, type KvErrorCode } from "@kv/interface";
import type { SeededRandom } from "../simulation/seeded-random.js";

/**
 * Operations that can suffer a fault: transfers, notifications (also those of transfers), and
 * requests on the side channel.
 */
export type FaultOperation = "READ" | "WRITE" | "NOTIFY" | "REQUEST";

/** Kinds of faults. */
export type FaultKind =
  /** A transfer never ends by itself; a notification or request is lost. */
  | "drop"
  /** A notification arrives twice. */
  | "duplicate"
  /** The operation takes `delayMs` longer; later notifications wait for a delayed one. */
  | "delay"
  /** A notification arrives `delayMs` later, and later notifications overtake it. */
  | "reorder"
  /** The link between the two hosts is cut, for `forMs` or for good. */
  | "disconnect"
  /**
   * A transfer fails after part of its bytes have landed; a notification or request is rejected.
   */
  | "fail"
  /** The reply to a request has random bytes. */
  | "garbage";

/** An operation, as a fault rule sees it. */
export interface FaultSubject {
  /** Kind of the operation. */
  readonly operation: FaultOperation;
  /** Host that starts it. */
  readonly from: string;
  /** Agent that starts it. Absent for requests. */
  readonly fromAgent?: string;
  /** Host at the other end. */
  readonly to: string;
  /** Agent at the other end. Absent for requests. */
  readonly toAgent?: string;
  /** Bytes of the transfer, payload or request. */
  readonly lengthBytes: number;
  /** Payload of a notification. */
  readonly payload?: Uint8Array;
}

/**
 * A fault, and the operations that suffer it. The first rule that matches an operation and injects
 * decides; an operation suffers one fault at most.
 */
export interface FaultRule {
  /** The fault. */
  readonly fault: FaultKind;
  /** Operations that the rule matches. @default all that the fault applies to */
  readonly operation?: FaultOperation | readonly FaultOperation[] | undefined;
  /** Name of the host or agent that starts the operation. @default any */
  readonly from?: string | undefined;
  /** Name of the host or agent at the other end. @default any */
  readonly to?: string | undefined;
  /** Further condition. @default none */
  readonly where?: ((subject: FaultSubject) => boolean) | undefined;
  /** Inject for the n-th matching operation only, counted from 1. @default for every one */
  readonly nth?: number | undefined;
  /** Probability for each matching operation. @default 1 */
  readonly probability?: number | undefined;
  /** Largest number of faults that the rule injects. @default no limit */
  readonly times?: number | undefined;
  /** Milliseconds for `delay` and `reorder`. @default 10 */
  readonly delayMs?: number | undefined;
  /** Milliseconds for `disconnect`. @default until `reconnect` */
  readonly forMs?: number | undefined;
  /** Code for `fail` of a transfer. @default "KV_TRANSFER_FAILED" */
  readonly code?: KvErrorCode | undefined;
}

const APPLIES_TO: Readonly<Record<FaultKind, readonly FaultOperation[]>> = {
  drop: ["READ", "WRITE", "NOTIFY", "REQUEST"],
  duplicate: ["NOTIFY"],
  delay: ["READ", "WRITE", "NOTIFY", "REQUEST"],
  reorder: ["NOTIFY"],
  disconnect: ["READ", "WRITE", "NOTIFY", "REQUEST"],
  fail: ["READ", "WRITE", "NOTIFY", "REQUEST"],
  garbage: ["REQUEST"],
};

/** Default of `FaultRule.delayMs`. */
export const DEFAULT_FAULT_DELAY_MS = 10;

/** Decides which operations suffer faults. */
export interface FaultPlan {
  /** Returns the rule whose fault the operation suffers; undefined for none. */
  decide(subject: FaultSubject): FaultRule | undefined;
  /**
   * Replaces all rules; the counters of `nth` and `times` start again.
   *
   * @throws `KV_CONFIG_INVALID`.
   */
  setRules(rules: readonly FaultRule[]): void;
  /** Returns the number of injected faults by kind. */
  counts(): Readonly<Partial<Record<FaultKind, number>>>;
}

/**
 * Creates a plan. The same seed and the same operations in the same order give the same faults.
 *
 * @throws `KV_CONFIG_INVALID`.
 */
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
  const possible = APPLIES_TO[rule.fault] as readonly FaultOperation[] | undefined;
  if (possible === undefined) throw invalid(`fault ${JSON.stringify(rule.fault)} is unknown`);
  const named = rule.operation === undefined ? possible : [rule.operation].flat();
  for (const operation of named) {
    if (!possible.includes(operation)) {
      throw invalid(
        `fault "${rule.fault}" does not apply to ${operation}, only to ${possible.join(", ")}`,
      );
    }
  }
  const { probability, nth, times, delayMs, forMs } = rule;
  if (probability !== undefined && !(probability >= 0 && probability <= 1)) {
    throw invalid(`probability ${probability} is not between 0 and 1`);
  }
  for (const [name, value] of Object.entries({ nth, times })) {
    if (value !== undefined && !(Number.isSafeInteger(value) && value >= 1)) {
      throw invalid(`${name} ${value} is not a positive integer`);
    }
  }
  for (const [name, value] of Object.entries({ delayMs, forMs })) {
    if (value !== undefined && !(value >= 0)) throw invalid(`${name} ${value} is not a duration`);
  }
  return { rule, operations: named, matched: 0, injected: 0 };
}

function matches({ rule, operations }: ActiveRule, subject: FaultSubject): boolean {
  if (!operations.includes(subject.operation)) return false;
  if (rule.from !== undefined && rule.from !== subject.from && rule.from !== subject.fromAgent)
    return false;
  if (rule.to !== undefined && rule.to !== subject.to && rule.to !== subject.toAgent) return false;
  return rule.where === undefined || rule.where(subject);
}

function invalid(message: string): KvError {
  return new KvError("KV_CONFIG_INVALID", `invalid fault rule: ${message}`);
}
