import type { FailureStage, Role } from "@kv/fleet";
import { KvError } from "@kv/interface";

/** An instance answered something that is no valid answer. The error has no `stage`, so the leg is not tried on another instance. */
export function badAnswer(role: Role, url: string, what: string, cause?: unknown): KvError {
  return new KvError("KV_PROXY_UPSTREAM_FAILED", `the ${role} instance ${url} ${what}`, {
    hint: `see the log of ${url}`,
    details: { role, instance: url },
    cause,
  });
}

/** An instance answered with a server failure. The client gets that answer where no other instance gives a better one. */
export function badStatus(role: Role, url: string, status: number): KvError {
  const stage: FailureStage = "status";
  return new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `the ${role} instance ${url} answered with status ${status}`,
    { hint: `see the log of ${url}`, details: { role, instance: url, stage, status } },
  );
}

/** Whether the server failed this time: a dead engine, a failed KV load, a gateway. A 501 would be the same on another instance. */
export function isServerFailure(status: number): boolean {
  return status === 500 || status === 502 || status === 503 || status === 504;
}
