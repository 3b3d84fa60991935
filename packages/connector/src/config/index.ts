export { EXTRA_CONFIG_KEYS } from "./extra-config.js";
export * from "./transfer-config.js";
export { kvTransferConfigSchema, transferConfigJsonSchema } from "./transfer-config-schema.js";
