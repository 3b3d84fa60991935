export * from "./process-registry.js";
export * from "./registry.js";
