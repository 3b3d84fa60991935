import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { ModelGeometry, RankGeometry } from "../geometry/rank-geometry.js";
import type { RequestBlocks } from "../request/request-checks.js";
import { planRequest, type RequestPlan } from "../request/request-plan.js";
import { regionsHolding } from "./cache-semantics.js";
import { notifiedRanks, proveNotifications } from "./notifications.js";
import { FoundFault, type ProofExtent, type ProofResult } from "./proof-result.js";
import { type ProofSubject, proofSubject } from "./proof-subject.js";
import { proveRequest } from "./prove-request.js";
import { sampleRequests } from "./sample-requests.js";
import { proveStages, type Stagings } from "./staging.js";
import { proveTables } from "./tables.js";

/** One request to prove. */
export interface ProofRequest {
  /** The blocks of the request. */
  readonly blocks: RequestBlocks;
  /** The request plan to prove. @default the result of `planRequest` */
  readonly plan?: RequestPlan | undefined;
}

/** Options of `provePlan`. */
export interface ProveOptions {
  /** Ranks of the remote engine; at least those that the plan reads. */
  readonly remotes: readonly RankGeometry[];
  /** KV heads of the whole model. Ignored for MLA. */
  readonly numKvHeads: number;
  /** KV heads of each group, where groups differ. @default numKvHeads */
  readonly groupKvHeads?: readonly number[] | undefined;
  /**
   * The copies between a device and the registered memory, on either side: the proof then goes from
   * device to device. All ranks of an engine have the same.
   */
  readonly staging?: Stagings | undefined;
  /** Requests to prove. @default sampleRequests */
  readonly requests?: readonly ProofRequest[] | undefined;
}

/** Options of `proveEnginePlans`. */
export interface ProveEngineOptions extends Omit<ProveOptions, "requests"> {
  /**
   * Requests to prove, each with its request plans by local rank. @default `sampleRequests`, and
   * the results of `planRequest`
   */
  readonly requests?: readonly EngineRequest[] | undefined;
}

/** One request of a whole engine. */
interface EngineRequest {
  readonly blocks: RequestBlocks;
  /** By plan. */
  readonly plans?: readonly RequestPlan[] | undefined;
}

/**
 * Proves that the plan of one local rank is right, or returns the first fault. The proof gives a
 * label to every byte of the remote caches, moves the labels by the plan's tables, the ids of the
 * requests and the receive pass, and compares them with what the local caches must hold by their
 * geometry and layout; it uses no code that built the plan. A fault is a result, not an error.
 *
 * @throws The errors of `planRequest` and `sampleRequests`.
 */
export function provePlan(plan: EngineTransferPlan, options: ProveOptions): ProofResult {
  const requests = options.requests?.map(({ blocks, plan: given }) => ({
    blocks,
    plans: given && [given],
  }));
  return prove([plan], { ...options, requests }, false);
}

/**
 * `provePlan` for all ranks of a local engine against one remote engine. It also proves that each
 * remote rank gets exactly the notifications that it awaits. `plans` has one plan per local rank.
 *
 * @throws The errors of `planRequest` and `sampleRequests`.
 */
export function proveEnginePlans(
  plans: readonly EngineTransferPlan[],
  options: ProveEngineOptions,
): ProofResult {
  return prove(plans, options, true);
}

function prove(
  plans: readonly EngineTransferPlan[],
  options: ProveEngineOptions,
  isWholeEngine: boolean,
): ProofResult {
  const { remotes, staging } = options;
  try {
    const [first] = plans;
    const asked: readonly EngineRequest[] =
      options.requests ?? (first === undefined ? [] : sampleRequests(first));
    const requests = asked.map(({ blocks, plans: given }) => ({
      blocks,
      plans: given ?? plans.map((plan) => planRequest(plan, blocks)),
    }));
    const model: Omit<ModelGeometry, "groups"> = options;
    const subjects = plans.map((plan) => proofSubject(plan, remotes, model));

    let [descriptors, blocks, patterns] = [0, 0, 0];
    for (const subject of subjects) {
      descriptors += proveTables(subject);
      if (staging !== undefined) proveStages(subject, staging);
    }
    for (const [index, subject] of subjects.entries()) {
      const proven = new Set<string>();
      for (const request of requests)
        blocks += proveRequest(
          subject,
          request.blocks,
          request.plans[index] as RequestPlan,
          proven,
        );
      patterns += proven.size;
    }
    for (const request of requests) {
      if (isWholeEngine) proveNotifications(plans, remotes, request.plans);
      else notifiedRanks(plans[0] as EngineTransferPlan, request.plans[0] as RequestPlan);
    }
    const extent: ProofExtent = { descriptors, requests: requests.length, blocks, patterns };
    return {
      proven: true,
      statements: statementsOf(isWholeEngine, staging !== undefined),
      assumed: assumptionsOf(subjects, staging !== undefined),
      extent,
    };
  } catch (error) {
    if (error instanceof FoundFault) return { proven: false, fault: error.fault };
    throw error;
  }
}

function statementsOf(isWholeEngine: boolean, isStaged: boolean): readonly string[] {
  return [
    "every block of every region has descriptors, and they lie at the same place within each block",
    "in the given requests, every byte that is needed comes exactly once from the source byte of the same layer, K or V, head and token",
    "only blocks of the request are written, and only blocks of the request are read",
    "tokens beyond the request are zeroed, unless the plan leaves them to be masked",
    ...(isStaged
      ? [
          "staging: each byte of a block on the wire is one byte of the device's block, of the same head, token and place, and no byte of the device is left out",
        ]
      : []),
    isWholeEngine
      ? "each remote rank gets exactly the notifications that it awaits"
      : "this rank notifies no remote rank twice",
  ];
}

function assumptionsOf(subjects: readonly ProofSubject[], isStaged: boolean): readonly string[] {
  const assumed = new Set<string>();
  if (isStaged) assumed.add("both copies pair a device block with the same pool block");
  for (const subject of subjects) {
    const { conversions, local, remote, uncovered } = subject.plan;
    if (conversions.includes("attention-order"))
      assumed.add(
        `the engine repacks the inside of a head from ${remote.attentionBackend} to ${local.attentionBackend}`,
      );
    if (uncovered === "masked") assumed.add("the engine masks tokens beyond a request's last");
    else if (hasCompressedCells(subject))
      assumed.add(
        "the engine masks tokens beyond a request's last in the last block of compressed latents",
      );
  }
  return [...assumed];
}

/** Whether blocks do not divide into tokens: the pass zeroes no part of such a block. */
function hasCompressedCells({ plan, contents }: ProofSubject): boolean {
  return [...plan.groups.keys()].some((group) =>
    regionsHolding(plan.local, group).some(
      (region) => contents(region, group).local.tokensPerStep > 1,
    ),
  );
}
