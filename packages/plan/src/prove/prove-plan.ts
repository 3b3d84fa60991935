import type { StagingLayout } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan-types.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { planRequest } from "../request/request-plan.js";
import type { RequestBlocks, RequestPlan } from "../request/request-plan-types.js";
import { regionsHolding } from "./contents/cache-semantics.js";
import { contentsOfRegion, type ProofSubject, proofSubject } from "./contents/proof-subject.js";
import { notifiedRanks, proveNotifications } from "./notification-proof.js";
import { headsOfPass } from "./pass-effect.js";
import { FoundFault, type ProofExtent, type ProofResult } from "./proof-result.js";
import { type ProvenPatterns, proveRequest } from "./request-proof.js";
import { sampleRequests } from "./sample-requests.js";
import { proveStage } from "./staging-proof.js";
import { proveTables } from "./table-proof.js";

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
   * device to device. All ranks of an engine have the same. @default undefined
   */
  readonly staging?:
    | { readonly local?: StagingLayout | undefined; readonly remote?: StagingLayout | undefined }
    | undefined;
  /** Requests to prove. @default sampleRequests */
  readonly requests?: readonly ProofRequest[] | undefined;
}

/** Options of `proveEnginePlans`. */
export interface ProveEngineOptions extends Omit<ProveOptions, "requests"> {
  /**
   * Requests to prove, each with its request plans by local rank. @default `sampleRequests`, and
   * the results of `planRequest`
   */
  readonly requests?:
    | readonly {
        readonly blocks: RequestBlocks;
        readonly plans?: readonly RequestPlan[] | undefined;
      }[]
    | undefined;
}

/**
 * Proves that the plan of one local rank is right, or returns the first fault. The proof reads the
 * plan's tables and the ids of the requests, and judges them by the geometries of both sides and by
 * their layouts; it uses no code that built the plan. A fault is a result, not an error. Errors:
 * those of `planRequest` and `sampleRequests`.
 */
export function provePlan(plan: EngineTransferPlan, options: ProveOptions): ProofResult {
  return judged(
    () => {
      const requests = (options.requests ?? sampleRequests(plan)).map(
        ({ blocks, plan: given }: ProofRequest) => ({
          blocks,
          plans: [given ?? planRequest(plan, blocks)],
        }),
      );
      for (const request of requests) notifiedRanks(plan, request.plans[0] as RequestPlan);
      return proveAll([plan], options, requests);
    },
    [plan],
    { wholeEngine: false, staged: options.staging !== undefined },
  );
}

/**
 * `provePlan` for all ranks of a local engine against one remote engine. It also proves that each
 * remote rank gets exactly the notifications that it awaits. `plans` has one plan per local rank.
 * Errors: those of `planRequest` and `sampleRequests`.
 */
export function proveEnginePlans(
  plans: readonly EngineTransferPlan[],
  options: ProveEngineOptions,
): ProofResult {
  return judged(
    () => {
      const [first] = plans;
      const samples = options.requests ?? (first === undefined ? [] : sampleRequests(first));
      const requests = samples.map(
        (sample: { blocks: RequestBlocks; plans?: readonly RequestPlan[] }) => ({
          blocks: sample.blocks,
          plans: sample.plans ?? plans.map((plan) => planRequest(plan, sample.blocks)),
        }),
      );
      const extent = proveAll(plans, options, requests);
      for (const request of requests) proveNotifications(plans, options.remotes, request.plans);
      return extent;
    },
    plans,
    { wholeEngine: true, staged: options.staging !== undefined },
  );
}

interface AskedRequest {
  readonly blocks: RequestBlocks;
  /** By plan. */
  readonly plans: readonly RequestPlan[];
}

function proveAll(
  plans: readonly EngineTransferPlan[],
  options: Omit<ProveOptions, "requests">,
  requests: readonly AskedRequest[],
): ProofExtent {
  const subjects = plans.map((plan) => proofSubject(plan, options.remotes, options));
  let [descriptors, blocks, patterns] = [0, 0, 0];
  for (const subject of subjects) {
    descriptors += proveTables(subject);
    proveStages(subject, options.staging);
  }
  for (const [index, subject] of subjects.entries()) {
    const proven: ProvenPatterns = new Set();
    for (const request of requests)
      blocks += proveRequest(subject, request.blocks, request.plans[index] as RequestPlan, proven);
    patterns += proven.size;
  }
  return { descriptors, requests: requests.length, blocks, patterns };
}

function proveStages(subject: ProofSubject, staging: ProveOptions["staging"]): void {
  const { plan, remotes } = subject;
  if (staging === undefined) return;
  for (const group of plan.groups.keys()) {
    for (const region of regionsHolding(plan.local, group)) {
      const regionContents = contentsOfRegion(subject, region, group);
      const own = plan.local.regions[region];
      if (staging.local !== undefined && own !== undefined) {
        const staged = {
          owner: "the local rank",
          rank: plan.local,
          region: own,
          contents: regionContents.local,
        };
        proveStage(staging.local, staged);
      }
      for (const [index, rank] of remotes.entries()) {
        const contents = regionContents.sources[index];
        const other = rank.regions[regionContents.remoteRegions[index] ?? -1];
        if (staging.remote === undefined || contents === undefined || other === undefined) continue;
        proveStage(staging.remote, {
          owner: `remote rank ${rank.tpRank}`,
          rank,
          region: other,
          contents,
        });
      }
    }
  }
}

function judged(
  prove: () => ProofExtent,
  plans: readonly EngineTransferPlan[],
  { wholeEngine, staged }: { readonly wholeEngine: boolean; readonly staged: boolean },
): ProofResult {
  try {
    const extent = prove();
    return {
      proven: true,
      statements: statementsOf(wholeEngine, staged),
      assumed: assumptionsOf(plans, staged),
      extent,
    };
  } catch (error) {
    if (error instanceof FoundFault) return { proven: false, fault: error.fault };
    throw error;
  }
}

function statementsOf(wholeEngine: boolean, staged: boolean): readonly string[] {
  return [
    "every block of every region has descriptors, and they lie at the same place within each block",
    "in the given requests, every byte that is needed comes exactly once from the source byte of the same layer, K or V, head and token",
    "only blocks of the request are written, and only blocks of the request are read",
    "tokens beyond the request are zeroed, unless the plan leaves them to be masked",
    ...(staged
      ? [
          "staging: each byte of a block on the wire is one byte of the device's block, of the same head, token and place, and no byte of the device is left out",
        ]
      : []),
    wholeEngine
      ? "each remote rank gets exactly the notifications that it awaits"
      : "this rank notifies no remote rank twice",
  ];
}

function assumptionsOf(plans: readonly EngineTransferPlan[], staged: boolean): readonly string[] {
  const assumed = new Set<string>();
  if (staged) assumed.add("both copies pair a device block with the same pool block");
  for (const plan of plans) {
    if (plan.conversions.includes("attention-order"))
      assumed.add(
        `the engine repacks the inside of a head from ${plan.remote.attentionBackend} to ${plan.local.attentionBackend}`,
      );
    if (plan.uncovered === "zeroed" && hasCompressedCells(plan))
      assumed.add(
        "the engine masks tokens beyond a request's last in the last block of compressed latents",
      );
    if (plan.uncovered === "masked") assumed.add("the engine masks tokens beyond a request's last");
  }
  return [...assumed];
}

/** Whether blocks do not divide into tokens: the pass zeroes no part of such a block. */
function hasCompressedCells(plan: EngineTransferPlan): boolean {
  const { local, groupPlans, regionsOfGroup } = plan;
  return groupPlans.some(({ extent, localBlockTokens, localPerLogical }, group) => {
    if (extent !== "sequence" && extent !== "window") return false;
    const tokens = localBlockTokens / localPerLogical;
    return (regionsOfGroup[group] ?? []).some(
      (region) =>
        headsOfPass(plan, group, region) === 1 &&
        (local.regions[region]?.blockLengthBytes ?? 0) % tokens !== 0,
    );
  });
}
