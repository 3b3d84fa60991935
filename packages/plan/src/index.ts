export {
  type CanonicalLayer,
  type CanonicalPage,
  type CanonicalRun,
  canonicalPage,
  proveCanonical,
} from "./canonical/canonical-page.js";
export {
  type CompatibilityOptions,
  checkCompatibility,
  type PairFacts,
  type ReceiveConversion,
} from "./engine/compatibility.js";
export type { RegionIndexing } from "./engine/descriptor-tables.js";
export {
  type BuildPlanOptions,
  buildEngineTransferPlan,
  type EngineTransferPlan,
} from "./engine/engine-plan.js";
export type { GroupPlan } from "./engine/group-plans.js";
export { type JointGroups, joinGroups } from "./engine/joint-groups.js";
export type { TransferForm } from "./engine/pieces.js";
export { withCellBytes } from "./engine/region-heads.js";
export type { SegmentPlan, SourcePlan, TransferList } from "./engine/source-plans.js";
export type { BlockOrder } from "./geometry/block-format.js";
export type {
  ModelGeometry,
  PackedMember,
  RankGeometry,
  RegionGeometry,
  StateSpaceGeometry,
} from "./geometry/rank-geometry.js";
export type {
  CacheKind,
  GroupExtent,
  Piece,
  PieceContext,
  PiecePlace,
  SourcePosition,
} from "./kinds/cache-kind.js";
export { cacheKind, joinsGroups, registerCacheKind } from "./kinds/registry.js";
export {
  applyReceivePass,
  type ReceivePass,
  type ReceivePassGroup,
  uncoveredRuns,
} from "./request/receive-pass.js";
export {
  type ExchangeOptions,
  exchangedBlocks,
  groupBlockTokens,
  type RequestBlocks,
} from "./request/request-blocks.js";
export { planRequest, type RemoteRankId, type RequestPlan } from "./request/request-plan.js";
export { type RequestRead, swapDirection } from "./request/request-read.js";
