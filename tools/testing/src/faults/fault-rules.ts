import type { FaultRule } from "@kv/transport-memory";

/**
 * Longer than a lease of the fault run: a message delayed this long arrives after the lease has
 * ended.
 */
export const LONG_MS = 9000;

/**
 * Every kind of fault, on every operation that can have it. About one request in eight has a fault.
 */
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
 * Faults for a pair whose consumer cannot ask the producer about a lease. The consumer assumes that
 * a vLLM producer receives every heartbeat that the transport accepted. If a heartbeat can be lost
 * or late, the consumer cannot know until when the producer keeps the blocks. These rules therefore
 * leave out such faults.
 */
export const PLAIN_FAULT_RULES: readonly FaultRule[] = FAULT_RULES.filter(
  ({ fault, operation, delayMs = 0 }) =>
    operation !== "NOTIFY" || (fault === "delay" && delayMs < 1000) || fault === "fail",
).filter(({ fault }) => fault !== "disconnect");

/** The same faults for push, whose transfers are WRITEs. */
export const PUSH_FAULT_RULES: readonly FaultRule[] = FAULT_RULES.map((rule) =>
  rule.operation === "READ" ? { ...rule, operation: "WRITE" } : rule,
);
