export { withCellBytes } from "./engine/cell-bytes.js";
export {
  type CompatibilityOptions,
  checkCompatibility,
  type PairFacts,
} from "./engine/compatibility.js";
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
export type {
  CacheKind,
  Piece,
  PieceContext,
  PiecePlace,
  SourcePosition,
} from "./kinds/cache-kind.js";
export { requireStatesFit } from "./kinds/mamba.js";
export { cacheKind, registerCacheKind } from "./kinds/registry.js";
export { applyReceivePass, uncoveredRuns } from "./receive/apply-receive-pass.js";
export {
  type ExchangeOptions,
  exchangedBlocks,
  groupBlockTokens,
} from "./request/exchanged-blocks.js";
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
