import type { FaultRule } from "@kv/transport-memory";

/** Longer than a lease of the fault run. */
export const LONG_MS = 9000;

type Row = readonly [fault: FaultRule["fault"], probability: number, more?: Partial<FaultRule>];

/** About one request in eight has a fault. */
const ROWS: Readonly<Record<"READ" | "NOTIFY" | "REQUEST", readonly Row[]>> = {
  READ: [
    ["drop", 0.004],
    ["fail", 0.01],
    ["fail", 0.004, { code: "KV_PEER_DISCONNECTED" }],
    ["delay", 0.01, { delayMs: 300 }],
    ["delay", 0.01, { delayMs: LONG_MS }],
    ["disconnect", 0.001, { forMs: 3000 }],
  ],
  NOTIFY: [
    ["drop", 0.02],
    ["duplicate", 0.02],
    ["delay", 0.01, { delayMs: 200 }],
    ["delay", 0.002, { delayMs: LONG_MS }],
    ["reorder", 0.02, { delayMs: 50 }],
    ["fail", 0.01],
    ["disconnect", 0.0003, { forMs: 8000 }],
  ],
  REQUEST: [
    ["drop", 0.01],
    ["fail", 0.01],
    ["delay", 0.02, { delayMs: 100 }],
    ["garbage", 0.01],
    ["disconnect", 0.0005, { forMs: 3000 }],
  ],
};

export const FAULT_RULES: readonly FaultRule[] = Object.entries(ROWS).flatMap(([operation, rows]) =>
  rows.map(([fault, probability, more]) => ({
    fault,
    operation: operation as keyof typeof ROWS,
    probability,
    ...more,
  })),
);

/**
 * A consumer that cannot ask about a lease assumes that a vLLM producer gets every heartbeat in
 * time.
 */
export const PLAIN_FAULT_RULES: readonly FaultRule[] = FAULT_RULES.filter(
  ({ fault, operation, delayMs = 0 }) =>
    operation !== "NOTIFY" || (fault === "delay" && delayMs < 1000) || fault === "fail",
).filter(({ fault }) => fault !== "disconnect");

export const PUSH_FAULT_RULES: readonly FaultRule[] = FAULT_RULES.map((rule) =>
  rule.operation === "READ" ? { ...rule, operation: "WRITE" } : rule,
);
