/** `@kv/http`: HTTP servers with limits. */

export {
  type ErrorForm,
  errorBody,
  errorForClient,
  type Overload,
  overloaded,
  refusedRequest,
  shortened,
  shownValue,
  statusOf,
  withoutAddresses,
} from "./answers/client-error.js";
export { type ErrorAnswer, errorAnswer, errorEvent, sendError } from "./answers/error-response.js";
export { send, sendJson } from "./answers/send-json.js";
export {
  BodyBudget,
  IncomingBody,
  type ReceivedBody,
} from "./bodies/read-body.js";
export {
  Certificate,
  type CertificateFiles,
  type CertificatePair,
  selfSigned,
} from "./certificate.js";
export {
  ClientConnections,
  type Member,
  MemberList,
  type RequestSlot,
  RequestsInFlight,
} from "./connections/client-connections.js";
export { EventFrames, editData, isDone, type StreamEvent } from "./events/event-frames.js";
export { type BodiesLimits, bodyLimits, connectionLimits, type HttpLimits } from "./http-limits.js";
export {
  type HttpBodyLimits,
  type HttpConnectionLimits,
  HttpServer,
  type HttpServerOptions,
  httpUrl,
  listen,
  type Turn,
} from "./http-server.js";
export { AT_ONCE_BYTES, type LongMember, parseJsonPieces } from "./json/json-pieces.js";
export {
  asBuffer,
  editMembers,
  editText,
  isObject,
  JsonValueEnd,
  listElements,
  type MemberEdits,
  rawMember,
  type TextEdit,
  TOP_LEVEL_MEMBERS,
  timesNamed,
} from "./json/json-reader.js";
