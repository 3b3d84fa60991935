export { type KvHeadRange, type KvReplication, kvHeadsOfRank, kvReplication } from "./kv-heads.js";
export {
  dcpConsumerCount,
  dcpSourceRanks,
  type EnginePair,
  handshakeTargetRanks,
  targetRemoteRanks,
  tpRatio,
} from "./remote-ranks.js";
export { computeTpMapping, type TpMapping, type TpMappingOptions } from "./tp-mapping.js";
