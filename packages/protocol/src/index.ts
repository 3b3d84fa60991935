export {
  type CompatibilityFactors,
  compareFactors,
  compatibilityHash,
  type FactorDifference,
} from "./compatibility/compatibility-hash.js";
export {
  type CompatibilityExplanation,
  explainCompatibility,
} from "./compatibility/explain-compatibility.js";
export {
  COMMON_CANDIDATES,
  type FactorCandidates,
  modelForms,
  speculativeForms,
} from "./compatibility/factor-candidates.js";
export {
  type Factors,
  findHashFactors,
  type HashClues,
  type HashSearch,
  searchHashFactors,
} from "./compatibility/hash-factors.js";
export { pythonJson } from "./compatibility/python-json.js";
export {
  decodeMsgpack,
  decodeMsgpackInSteps,
  encodeMsgpack,
  Float64,
  formatValue,
  MSGPACK_LIMITS,
  type MsgpackLimits,
} from "./encoding/messages.js";
export {
  type AgentMetadata,
  decodeAgentMetadata,
  encodeAgentMetadata,
} from "./handshake/agent-metadata.js";
export {
  decodeHandshakePayload,
  decodeHandshakeRefusal,
  decodeHandshakeReply,
  decodeHandshakeRequest,
  encodeHandshakePayload,
  encodeHandshakeRefusal,
  encodeHandshakeReply,
  encodeHandshakeRequest,
  type HandshakeExtension,
  type HandshakePayload,
  type HandshakeReply,
  type HandshakeRequest,
} from "./handshake/handshake.js";
export { checkHandshakeSeal, sealHandshake } from "./handshake/handshake-seal.js";
export {
  decodeLeaseQuery,
  decodeLeaseReply,
  encodeLeaseQuery,
  encodeLeaseReply,
  type LeaseQuery,
  type LeaseReply,
  type PromptPrefix,
} from "./handshake/lease-query.js";
export {
  decodeDone,
  decodeNotification,
  decodeNotificationInSteps,
  decodeRequestControl,
  type ExtensionMessage,
  encodeNotification,
  encodeRequestControl,
  isWireSafeRequestId,
  type KvNotification,
  REQUEST_CONTROL,
  type RequestControlMessage,
  type RequestProof,
} from "./notifications/notifications.js";
export {
  type DecodePushRegistrationOptions,
  decodePushControl,
  decodePushRegistration,
  decodeRegistration,
  encodePushRegistration,
  encodeRegistration,
  encodeRegistrationEnded,
  encodeRegistrationWritten,
  encodeWithdrawal,
  PUSH_CONTROL,
  type PushControlMessage,
  type PushRegistration,
  type Registrant,
  type Registration,
  type RegistrationEnded,
  type RegistrationExtension,
  type RegistrationRequest,
  type RegistrationWritten,
} from "./notifications/push-messages.js";
export {
  baseRequestId,
  blocksDigest,
  checkRemotePrefillParams,
  decodePrompt,
  type EncodedPrompt,
  encodePrompt,
  encodeRemotePrefillParams,
  MAX_REQUEST_ID_BYTES,
  namesReadback,
  newCapability,
  type PromptContent,
  parseTransferParams,
  peerTraceparent,
  promptContent,
  promptDigest,
  type RemoteLease,
  type RemotePrefillAnswer,
  type RemotePrefillParams,
  type RequestParams,
  readbackParams,
  readFirstToken,
  readTransferId,
  sameCapability,
  type TransferMode,
} from "./transfer-params/transfer-params.js";
export { type VllmRequests, vllmRequests } from "./versions/vllm-requests.js";
export {
  describedVersion,
  NEWEST_VLLM_VERSION,
  VLLM_VERSIONS,
  type VllmVersion,
  type VllmWire,
  vllmWire,
  type WireSection,
} from "./versions/vllm-wire.js";
