export { type KvHeadRange, type KvReplication, kvHeadsOfRank, kvReplication } from "./kv-heads.js";
export {
  dcpConsumerCount,
  type EnginePair,
  handshakeSourceRanks,
  handshakeTargetRanks,
  targetRemoteRanks,
  tpRatio,
} from "./remote-ranks.js";
export { computeTpMapping, type TpMapping, type TpMappingOptions } from "./tp-mapping.js";
