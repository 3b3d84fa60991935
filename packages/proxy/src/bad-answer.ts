import { KvError } from "@kv/interface";
import type { FailureStage, Role } from "./upstream.js";

/** An instance that was reached and answered what makes no sense. It has no `stage`: the leg is not tried elsewhere for it. */
export function badAnswer(role: Role, url: string, what: string, cause?: unknown): KvError {
  return new KvError("KV_PROXY_UPSTREAM_FAILED", `the ${role} instance ${url} ${what}`, {
    hint: `see the log of ${url}`,
    details: { role, instance: url },
    cause,
  });
}

/** An instance's own error of 500 and more, which is the answer where no other instance gives a better one. */
export function badStatus(role: Role, url: string, status: number): KvError {
  const stage: FailureStage = "status";
  return new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `the ${role} instance ${url} answered with status ${status}`,
    {
      hint: `see the log of ${url}`,
      details: { role, instance: url, stage, status },
    },
  );
}

/** Says that the server could not, this time: an engine that died, a KV load that failed, a gateway. 501 would be said again elsewhere. */
export function isServerFailure(status: number): boolean {
  return status === 500 || status === 502 || status === 503 || status === 504;
}
