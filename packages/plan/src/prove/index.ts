/** `@kv/plan/prove`: proofs that plans are right, and the faults that they find. */
export { type CacheSemantics, registerCacheSemantics } from "./contents/cache-semantics.js";
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
export { sampleRequests } from "./sample-requests.js";
