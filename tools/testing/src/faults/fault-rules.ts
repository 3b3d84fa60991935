import type { FaultRule } from "@kv/transport-memory";

/** Longer than a lease of the fault run. */
export const LONG_MS = 9000;

/** Every fault, on every operation that can have it: about one request in eight has one. */
export const FAULT_RULES: readonly FaultRule[] = [
  { fault: "drop", operation: "READ", probability: 0.004 },
  { fault: "fail", operation: "READ", probability: 0.01 },
  { fault: "fail", operation: "READ", probability: 0.004, code: "KV_PEER_DISCONNECTED" },
  { fault: "delay", operation: "READ", probability: 0.01, delayMs: 300 },
  { fault: "delay", operation: "READ", probability: 0.01, delayMs: LONG_MS },
  { fault: "disconnect", operation: "READ", probability: 0.001, forMs: 3000 },
  { fault: "drop", operation: "NOTIFY", probability: 0.02 },
  { fault: "duplicate", operation: "NOTIFY", probability: 0.02 },
  { fault: "delay", operation: "NOTIFY", probability: 0.01, delayMs: 200 },
  { fault: "delay", operation: "NOTIFY", probability: 0.002, delayMs: LONG_MS },
  { fault: "reorder", operation: "NOTIFY", probability: 0.02, delayMs: 50 },
  { fault: "fail", operation: "NOTIFY", probability: 0.01 },
  { fault: "disconnect", operation: "NOTIFY", probability: 0.0003, forMs: 8000 },
  { fault: "drop", operation: "REQUEST", probability: 0.01 },
  { fault: "fail", operation: "REQUEST", probability: 0.01 },
  { fault: "delay", operation: "REQUEST", probability: 0.02, delayMs: 100 },
  { fault: "garbage", operation: "REQUEST", probability: 0.01 },
  { fault: "disconnect", operation: "REQUEST", probability: 0.0005, forMs: 3000 },
];

/**
 * For a consumer that cannot ask the producer about a lease. It assumes that a vLLM producer gets
 * every heartbeat that the transport accepted: none may be lost or late.
 */
export const PLAIN_FAULT_RULES: readonly FaultRule[] = FAULT_RULES.filter(
  ({ fault, operation, delayMs = 0 }) =>
    operation !== "NOTIFY" || (fault === "delay" && delayMs < 1000) || fault === "fail",
).filter(({ fault }) => fault !== "disconnect");

export const PUSH_FAULT_RULES: readonly FaultRule[] = FAULT_RULES.map((rule) =>
  rule.operation === "READ" ? { ...rule, operation: "WRITE" } : rule,
);
