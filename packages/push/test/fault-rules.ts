import type { FaultRule } from "@kv/transport-memory";
import { FAULT_RULES } from "../../pull/test/fault-rules.js";

/** Pull's fault rules, applied to WRITEs instead of READs. */
export const PUSH_FAULT_RULES: readonly FaultRule[] = FAULT_RULES.map((rule) =>
  rule.operation === "READ" ? { ...rule, operation: "WRITE" } : rule,
);
