export { diffPlans, type PlanDifference } from "./data/plan-diff.js";
export { planFromDocument, planToDocument } from "./data/plan-document.js";
export { hashPlan } from "./data/plan-hash.js";
export { PLAN_DOCUMENT_VERSION, type PlanDocument, planDocumentSchema } from "./data/plan-schema.js";
export { type CompatibilityOptions, checkCompatibility, type PairFacts } from "./engine/compatibility.js";
export { type BuildPlanOptions, buildEngineTransferPlan } from "./engine/engine-plan.js";
export type {
  BlockOrder,
  EngineTransferPlan,
  GroupExtent,
  GroupPlan,
  ReceiveConversion,
  RegionIndexing,
  SegmentPlan,
  SourcePlan,
  TransferForm,
  TransferList,
} from "./engine/engine-plan-types.js";
export { type JointGroups, joinGroups, joinsGroups } from "./engine/joint-groups.js";
export type {
  ModelGeometry,
  PackedMember,
  RankGeometry,
  RegionGeometry,
  StateSpaceGeometry,
} from "./geometry/rank-geometry.js";
export type { CacheKind, Piece, PieceContext, PiecePlace, SourcePosition } from "./kinds/cache-kind.js";
export { requireStatesFit } from "./kinds/mamba.js";
export { cacheKind, cacheKindNames } from "./kinds/registry.js";
export {
  PLAN_FAULT_KINDS,
  type PlanFault,
  type PlanFaultKind,
  type ProofExtent,
  type ProofResult,
} from "./prove/proof-result.js";
export {
  type ProofRequest,
  type ProveEngineOptions,
  type ProveOptions,
  proveEnginePlans,
  provePlan,
} from "./prove/prove-plan.js";
export { sampleRequests } from "./prove/sample-requests.js";
export { applyReceivePass } from "./receive/apply-receive-pass.js";
export { type ExchangeOptions, exchangedBlocks } from "./request/exchanged-blocks.js";
export { mergedDescriptorCount } from "./request/merged-descriptors.js";
export { planRequest } from "./request/request-plan.js";
export type {
  ReceivePass,
  ReceivePassGroup,
  RemoteRankId,
  RequestBlocks,
  RequestPlan,
  RequestRead,
} from "./request/request-plan-types.js";
export { swapDirection } from "./request/swap-direction.js";
