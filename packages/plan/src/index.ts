export {
  applyDcpPrefixCaching,
  applyPrefixCaching,
  type DcpSlices,
  logicalToKernelBlockIds,
  mapBlockIdsForBlockSizeRatio,
} from "./block-ids.js";
export { diffPlans, type PlanDifference } from "./data/plan-diff.js";
export { hashPlan, planFromDocument, planToDocument } from "./data/plan-document.js";
export { PLAN_DOCUMENT_VERSION, type PlanDocument, planDocumentSchema } from "./data/plan-schema.js";
export {
  computeDescriptorIds,
  createDescriptorIdWriter,
  type DescriptorIdOptions,
} from "./descriptor-ids.js";
export { type BuildPlanOptions, buildEngineTransferPlan } from "./engine-plan.js";
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
  TransferOperation,
} from "./engine-plan-types.js";
export { type ExchangeOptions, exchangedBlocks } from "./exchanged-blocks.js";
export type {
  ModelGeometry,
  PackedMember,
  RankGeometry,
  RegionGeometry,
  StateSpaceGeometry,
} from "./geometry.js";
export { type JointGroups, joinGroups, joinsGroups } from "./joint-groups.js";
export type { CacheKind, Piece, PieceContext, PiecePlace, SourcePosition } from "./kinds/cache-kind.js";
export { requireStatesFit } from "./kinds/mamba.js";
export { cacheKind, cacheKindNames } from "./kinds/registry.js";
export { mergedDescriptorCount } from "./merged-descriptors.js";
export { fromOtherSide } from "./other-side.js";
export { type CompatibilityOptions, checkCompatibility, type PairFacts } from "./pair-checks.js";
export {
  type ProofRequest,
  type ProveEngineOptions,
  type ProveOptions,
  proveEnginePlans,
  provePlan,
} from "./prove/prove-plan.js";
export { sampleRequests } from "./prove/sample-requests.js";
export {
  PLAN_FAULT_KINDS,
  type PlanFault,
  type PlanFaultKind,
  type PlanVerdict,
  type ProofExtent,
} from "./prove/verdict.js";
export { applyReceivePass } from "./receive-pass.js";
export { planRequest } from "./request-plan.js";
export type {
  ReceivePass,
  ReceivePassGroup,
  RemoteRankId,
  RequestBlocks,
  RequestPlan,
  RequestRead,
} from "./request-plan-types.js";
