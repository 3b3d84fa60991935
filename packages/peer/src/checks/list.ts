import type { Compatibility } from "../doctor/compatibility-checks.js";
import { leaseChecks } from "../doctor/lease-check.js";
import { type PlanOptions, planChecks } from "../doctor/plan-checks.js";
import type { ServerFacts } from "../doctor/server-facts.js";
import { clockChecks, versionChecks } from "../doctor/version-checks.js";
import { type LaneEvidence, laneChecks } from "../verify/lane-checks.js";
import {
  blockChecks,
  requestChecks,
  type SeenDeployment,
  tokenChecks,
  transferChecks,
} from "../verify/verify-checks.js";
import { addressChecks, type WatchedServer } from "../watch/server-checks.js";
import type { Check } from "./report.js";

/** What the commands read, and checks judge. */
export interface AllFacts {
  readonly prefill: ServerFacts;
  readonly decode: ServerFacts;
  readonly compatibility: Compatibility;
  readonly plan: PlanOptions;
  readonly leaseMs: number;
  /** What reading the servers' memory has shown. */
  readonly memory: readonly Check[];
  readonly deployment: SeenDeployment;
  readonly lane: LaneEvidence;
  readonly watched: WatchedServer;
}

/** What a command has read. A fact that it does not read, or could not read, is absent. */
type Facts = { readonly [Fact in keyof AllFacts]?: AllFacts[Fact] | undefined };

interface Entry {
  readonly needs: readonly (keyof AllFacts)[];
  readonly judge: (facts: AllFacts) => readonly Check[];
}

/**
 * All checks, in the order of reports: those of `doctor`, of `verify` and of `watch`. A command
 * selects by what it reads: a check is made where all that it needs is known.
 */
const CHECKS: readonly Entry[] = [
  { needs: ["prefill"], judge: ({ prefill }) => prefill.reading ?? [] },
  { needs: ["decode"], judge: ({ decode }) => decode.reading ?? [] },
  { needs: ["prefill", "compatibility"], judge: versionChecks },
  { needs: ["compatibility"], judge: ({ compatibility }) => compatibility.checks },
  { needs: ["prefill", "decode", "plan"], judge: planChecks },
  { needs: ["prefill"], judge: ({ prefill }) => clockChecks(prefill) },
  { needs: ["decode"], judge: ({ decode }) => clockChecks(decode) },
  { needs: ["prefill", "decode", "leaseMs"], judge: leaseChecks },
  { needs: ["memory"], judge: ({ memory }) => memory },

  { needs: ["deployment"], judge: requestChecks },
  { needs: ["deployment"], judge: transferChecks },
  { needs: ["deployment", "lane"], judge: laneChecks },
  { needs: ["deployment"], judge: blockChecks },
  { needs: ["deployment"], judge: tokenChecks },

  { needs: ["watched"], judge: ({ watched }) => watched.reading },
  { needs: ["watched"], judge: ({ watched }) => addressChecks(watched) },
];

export function judge(facts: Facts): Check[] {
  const isKnown = (need: keyof AllFacts) => facts[need] !== undefined;
  return CHECKS.filter(({ needs }) => needs.every(isKnown)).flatMap((each) =>
    each.judge(facts as AllFacts),
  );
}
