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
export { formatValue } from "./encoding/format-value.js";
export {
  decodeMsgpack,
  decodeMsgpackInSteps,
  encodeMsgpack,
  Float64,
  MSGPACK_LIMITS,
  type MsgpackLimits,
} from "./encoding/msgpack.js";
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
  decodeNotification,
  decodeNotificationInSteps,
  type ExtensionMessage,
  encodeNotification,
  isWireSafeRequestId,
  type KvNotification,
  MAX_REQUEST_ID_BYTES,
} from "./notifications/notifications.js";
export {
  decodePushControl,
  decodeRegistration,
  encodeRegistration,
  encodeRegistrationEnded,
  encodeRegistrationWritten,
  encodeWithdrawal,
  PUSH_CONTROL,
  type PushControlMessage,
} from "./notifications/push-control.js";
export {
  type DecodePushRegistrationOptions,
  decodePushRegistration,
  encodePushRegistration,
  type PushRegistration,
} from "./notifications/push-registration.js";
export type {
  Registrant,
  Registration,
  RegistrationEnded,
  RegistrationExtension,
  RegistrationRequest,
  RegistrationWritten,
} from "./notifications/registration.js";
export {
  decodeDone,
  decodeRequestControl,
  encodeRequestControl,
  REQUEST_CONTROL,
  type RequestControlMessage,
  type RequestProof,
} from "./notifications/request-control.js";
export { readSpans, type TraceSpan } from "./read-spans.js";
export { blocksDigest, newCapability, sameCapability } from "./transfer-params/capability.js";
export {
  decodePrompt,
  type EncodedPrompt,
  encodePrompt,
  type PromptContent,
  promptContent,
  promptDigest,
} from "./transfer-params/prompt-digest.js";
export {
  baseRequestId,
  checkRemotePrefillParams,
  encodeRemotePrefillParams,
  namesReadback,
  parseTransferParams,
  peerTraceparent,
  type RemoteLease,
  type RemotePrefillAnswer,
  type RemotePrefillParams,
  type RequestParams,
  readbackParams,
  readFirstToken,
  readTransferId,
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
