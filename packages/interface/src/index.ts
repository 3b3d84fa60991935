export * from "./ambient.js";
export * from "./connector.js";
export * from "./connector-module.js";
export * from "./errors.js";
export * from "./kv-cache.js";
export * from "./platform.js";
export * from "./side-channel.js";
export * from "./transport.js";
