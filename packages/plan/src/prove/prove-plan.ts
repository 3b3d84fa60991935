import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "../engine-plan-types.js";
import type { RankGeometry } from "../geometry.js";
import { planRequest } from "../request-plan.js";
import type { RequestBlocks, RequestPlan } from "../request-plan-types.js";
import { proveNotifications, ranksTold } from "./notification-proof.js";
import { proofSubject } from "./pair-meaning.js";
import { type ProvenPatterns, proveRequest } from "./request-proof.js";
import { sampleRequests } from "./sample-requests.js";
import { proveTables } from "./table-proof.js";
import { FoundFault, type PlanVerdict, type ProofExtent } from "./verdict.js";

/** One request to prove; `plan` is what is to be done for it, by default what `planRequest` says. */
export interface ProofRequest {
  readonly blocks: RequestBlocks;
  readonly plan?: RequestPlan;
}

export interface ProveOptions {
  /** Ranks of the remote engine, those at least that the plan reads. */
  readonly remotes: readonly RankGeometry[];
  /** KV heads of the whole model; not looked at for MLA. */
  readonly numKvHeads: number;
  /** KV heads of each group, where groups differ in them. */
  readonly groupKvHeads?: readonly number[];
  /** Default: samples that cover the first and the last block, runs and scattered blocks, a partial last block and a prefix hit. */
  readonly requests?: readonly ProofRequest[];
}

export interface ProveEngineOptions extends Omit<ProveOptions, "requests"> {
  /** Per request, its blocks and (by local rank) what is to be done for it; by default what `planRequest` says. */
  readonly requests?: readonly { readonly blocks: RequestBlocks; readonly plans?: readonly RequestPlan[] }[];
}

/**
 * Shows that the plan of one local rank is right, or names the first fault. It looks at the plan's tables and at the request's ids, and
 * judges them by both sides' geometries and the meaning of their layouts; nothing that made the plan is used. Never throws for a fault. Errors:
 * `KV_PLAN_UNSUPPORTED` for a plan that writes, and what `planRequest` throws.
 */
export function provePlan(plan: EngineTransferPlan, options: ProveOptions): PlanVerdict {
  return judged(() => {
    const requests = (options.requests ?? sampleRequests(plan)).map(
      ({ blocks, plan: given }: ProofRequest) => ({
        blocks,
        plan: given ?? planRequest(plan, blocks),
      }),
    );
    for (const request of requests) ranksTold(plan, request.plan);
    return proveOne(plan, options, requests);
  }, [plan]);
}

/**
 * The same for all ranks of a local engine against one remote engine, and that each remote rank gets exactly the notifications that it
 * waits for: that takes all local ranks. `plans` has one entry per local rank.
 */
export function proveEnginePlans(
  plans: readonly EngineTransferPlan[],
  options: ProveEngineOptions,
): PlanVerdict {
  return judged(
    () => {
      const [first] = plans;
      const samples = options.requests ?? (first === undefined ? [] : sampleRequests(first));
      const requests = samples.map((sample: { blocks: RequestBlocks; plans?: readonly RequestPlan[] }) => ({
        blocks: sample.blocks,
        plans: sample.plans ?? plans.map((plan) => planRequest(plan, sample.blocks)),
      }));
      let extent: ProofExtent = { descriptors: 0, requests: requests.length, blocks: 0, patterns: 0 };
      for (const [index, plan] of plans.entries()) {
        const own = requests.map(({ blocks, plans: all }) => ({ blocks, plan: all[index] as RequestPlan }));
        const one = proveOne(plan, options, own);
        extent = {
          ...extent,
          descriptors: extent.descriptors + one.descriptors,
          blocks: extent.blocks + one.blocks,
          patterns: extent.patterns + one.patterns,
        };
      }
      for (const request of requests) proveNotifications(plans, options.remotes, request.plans);
      return extent;
    },
    plans,
    true,
  );
}

function proveOne(
  plan: EngineTransferPlan,
  options: Omit<ProveOptions, "requests">,
  requests: readonly { blocks: RequestBlocks; plan: RequestPlan }[],
): ProofExtent {
  requireRead(plan);
  const subject = proofSubject(plan, options.remotes, options);
  const descriptors = proveTables(subject);
  const proven: ProvenPatterns = new Set();
  let blocks = 0;
  for (const request of requests) blocks += proveRequest(subject, request.blocks, request.plan, proven);
  return { descriptors, requests: requests.length, blocks, patterns: proven.size };
}

/** What is written lands in blocks of which this plan's side does not say what they are for. */
function requireRead(plan: EngineTransferPlan): void {
  if (plan.operation === "READ") return;
  throw new KvError("KV_PLAN_UNSUPPORTED", "only plans that read can be proven, this one writes", {
    hint: "prove the plan with which the other side would read the same blocks",
  });
}

function judged(
  prove: () => ProofExtent,
  plans: readonly EngineTransferPlan[],
  wholeEngine = false,
): PlanVerdict {
  try {
    const extent = prove();
    return {
      proven: true,
      statements: statementsOf(wholeEngine),
      assumed: assumptionsOf(plans),
      extent,
    };
  } catch (error) {
    if (error instanceof FoundFault) return { proven: false, fault: error.fault };
    throw error;
  }
}

function statementsOf(wholeEngine: boolean): readonly string[] {
  return [
    "every block of every region has descriptors, and they lie at the same place within each block",
    "in the requests looked at, every byte that is needed comes exactly once from the source byte of the same layer, K or V, head and token",
    "nothing but the request's blocks is written, and only the request's blocks are read",
    "tokens that the request does not have are zeroed, where the plan does not leave them to be masked",
    wholeEngine
      ? "each remote rank gets exactly the notifications that it waits for"
      : "no remote rank is told twice by this rank",
  ];
}

function assumptionsOf(plans: readonly EngineTransferPlan[]): readonly string[] {
  const assumed = new Set<string>();
  for (const plan of plans) {
    if (plan.conversions.includes("attention-order"))
      assumed.add(
        `the engine repacks the inside of a head from ${plan.remote.attentionBackend} to ${plan.local.attentionBackend}`,
      );
    if (plan.uncovered === "masked") assumed.add("the engine masks tokens beyond a request's last");
  }
  return [...assumed];
}
