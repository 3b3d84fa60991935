export { withCellBytes } from "./engine/cell-bytes.js";
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
export { type JointGroups, joinGroups, joinsGroups } from "./engine/joint-groups.js";
export type { SegmentPlan, SourcePlan, TransferList } from "./engine/source-plans.js";
export type { TransferForm } from "./engine/transfer-form.js";
export type { BlockOrder } from "./geometry/layout.js";
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
export { requireStatesFit } from "./kinds/mamba.js";
export { cacheKind, registerCacheKind } from "./kinds/registry.js";
export { applyReceivePass, uncoveredRuns } from "./receive/apply-receive-pass.js";
export type { ReceivePass, ReceivePassGroup } from "./receive/build-receive-pass.js";
export {
  type ExchangeOptions,
  exchangedBlocks,
  groupBlockTokens,
} from "./request/exchanged-blocks.js";
export type { RequestBlocks } from "./request/request-checks.js";
export { planRequest, type RemoteRankId, type RequestPlan } from "./request/request-plan.js";
export type { RequestRead } from "./request/request-read.js";
export { swapDirection } from "./request/swap-direction.js";
