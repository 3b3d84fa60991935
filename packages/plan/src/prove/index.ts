/** `@kv/plan/prove`: proofs that plans are right, and the faults that they find. */
export {
  type CacheSemantics,
  type HeadRange,
  headsInRegion,
  registerCacheSemantics,
} from "./cache-semantics.js";
export {
  type DescriptorLookup,
  descriptorLookup,
  type MemoryPlace,
  mergedDescriptorCount,
} from "./descriptors.js";
export { type BlockTokens, type NeededTokens, neededTokens } from "./needed-tokens.js";
export {
  PLAN_FAULT_KINDS,
  type PlanFault,
  type PlanFaultKind,
  type ProofExtent,
  type ProofResult,
} from "./proof-result.js";
export {
  type ProofRequest,
  type ProveEngineOptions,
  type ProveOptions,
  proveEnginePlans,
  provePlan,
} from "./prove-plan.js";
export { type BlockPass, passByBlock } from "./prove-request.js";
export { sampleRequests } from "./sample-requests.js";
