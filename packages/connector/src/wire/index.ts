export * from "./agent-metadata.js";
export * from "./compatibility.js";
export * from "./compatibility-candidates.js";
export {
  type CompatibilityFactors,
  compareFactors,
  compatibilityHash,
  type FactorDifference,
} from "./compatibility-factors.js";
export * from "./handshake.js";
export { checkHandshakeSeal, sealHandshake } from "./handshake-seal.js";
export * from "./msgpack.js";
export * from "./notifications.js";
export * from "./push-registration.js";
export { pythonJson } from "./python-json.js";
export * from "./transfer-params.js";
