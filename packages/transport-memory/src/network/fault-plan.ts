import { KvError, type KvErrorCode } from "@kv/interface";
import type { SeededRandom } from "../simulation/seeded-random.js";

/** `NOTIFY` includes notifications of transfers; `REQUEST` is a side-channel request. */
export type FaultOperation = "READ" | "WRITE" | "NOTIFY" | "REQUEST";

/** What a fault does. */
export type FaultKind =
  /** A transfer never ends by itself; others are lost. */
  | "drop"
  /** A notification arrives twice. */
  | "duplicate"
  /** The operation takes `delayMs` longer; later notifications wait for it. */
  | "delay"
  /** A notification is `delayMs` late, and later ones overtake it. */
  | "reorder"
  /** The link between two hosts is cut, for `forMs` or for good. */
  | "disconnect"
  /** A transfer fails with part of its bytes landed; others are rejected. */
  | "fail"
  /** A request's reply has random bytes. */
  | "garbage";

/** An operation, as a fault rule sees it. */
export interface FaultSubject {
  readonly operation: FaultOperation;
  readonly from: string;
  /** Absent for requests. */
  readonly fromAgent?: string;
  readonly to: string;
  /** Absent for requests. */
  readonly toAgent?: string;
  readonly lengthBytes: number;
  readonly payload?: Uint8Array;
}

/**
 * A fault and its operations. The first rule that matches and injects decides, so an operation
 * suffers one fault at most.
 */
export interface FaultRule {
  readonly fault: FaultKind;
  /** @default all that the fault applies to */
  readonly operation?: FaultOperation | readonly FaultOperation[] | undefined;
  readonly from?: string | undefined;
  readonly to?: string | undefined;
  readonly where?: ((subject: FaultSubject) => boolean) | undefined;
  /** Only the n-th match, from 1. @default every one */
  readonly nth?: number | undefined;
  readonly probability?: number | undefined;
  /** @default no limit */
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

/** Returns ms, and 0 for other faults. */
export function delayOf(rule: FaultRule | undefined, ...faults: readonly FaultKind[]): number {
  return rule !== undefined && faults.includes(rule.fault) ? (rule.delayMs ?? 10) : 0;
}

/** Decides which operations suffer faults: equal for equal seeds and orders of operations. */
export class FaultPlan {
  readonly #random: SeededRandom;
  readonly #counts: Partial<Record<FaultKind, number>> = {};
  #active: ActiveRule[];

  constructor(rules: readonly FaultRule[], random: SeededRandom) {
    this.#random = random;
    this.#active = rules.map(activate);
  }

  decide(subject: FaultSubject): FaultRule | undefined {
    for (const entry of this.#active) {
      if (!matches(entry, subject)) continue;
      entry.matched += 1;
      const { nth, probability, times, fault } = entry.rule;
      if (nth !== undefined && entry.matched !== nth) continue;
      if (probability !== undefined && this.#random.next() >= probability) continue;
      if (times !== undefined && entry.injected >= times) continue;
      entry.injected += 1;
      this.#counts[fault] = (this.#counts[fault] ?? 0) + 1;
      return entry.rule;
    }
    return undefined;
  }

  /**
   * Replaces all rules and resets the counters of `nth` and `times`.
   * @throws `KV_CONFIG_INVALID`.
   */
  setRules(rules: readonly FaultRule[]): void {
    this.#active = rules.map(activate);
  }

  counts(): Readonly<Partial<Record<FaultKind, number>>> {
    return { ...this.#counts };
  }
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
