import { KvError } from "@kv/interface";

/** `KV_PLAN_INCOMPATIBLE`: the two sides disagree. */
export function incompatible(
  what: string,
  local: unknown,
  remote: unknown,
  hint?: string,
): KvError {
  return bothValues("KV_PLAN_INCOMPATIBLE", what, local, remote, hint);
}

/** `KV_PLAN_UNSUPPORTED`: each side is sound, but there is no plan for the pair. */
export function unsupported(what: string, local: unknown, remote: unknown, hint?: string): KvError {
  return bothValues("KV_PLAN_UNSUPPORTED", what, local, remote, hint);
}

function bothValues(
  code: "KV_PLAN_INCOMPATIBLE" | "KV_PLAN_UNSUPPORTED",
  what: string,
  local: unknown,
  remote: unknown,
  hint: string | undefined,
): KvError {
  return new KvError(code, `${what}: local ${format(local)}, remote ${format(remote)}`, {
    ...(hint === undefined ? {} : { hint }),
    details: { what, local, remote },
  });
}

function format(value: unknown): string {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 200 ? `${text.slice(0, 200)}…` : text;
}

/** `KV_PLAN_INVALID`: a side contradicts itself. */
export function invalidPlan(message: string, details?: Record<string, unknown>): KvError {
  return new KvError("KV_PLAN_INVALID", message, details && { details });
}
