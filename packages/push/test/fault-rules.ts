import { FAULT_RULES } from "@kv/testing/faults/fault-rules";
import type { FaultRule } from "@kv/transport-memory";

/** Pull's fault rules, applied to WRITEs instead of READs. */
export const PUSH_FAULT_RULES: readonly FaultRule[] = FAULT_RULES.map((rule) =>
  rule.operation === "READ" ? { ...rule, operation: "WRITE" } : rule,
);
