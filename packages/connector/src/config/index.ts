export { EXTRA_CONFIG_KEYS } from "./extra-config.js";
export { readHandshakeKey } from "./handshake-key.js";
export * from "./transfer-config.js";
export { kvTransferConfigSchema, transferConfigJsonSchema } from "./transfer-config-schema.js";
