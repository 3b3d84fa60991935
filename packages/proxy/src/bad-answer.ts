import { KvError } from "@kv/interface";
import type { Role } from "./upstream.js";

/** An instance that was reached and did not do its part. It has no `stage`: the leg is not tried elsewhere for it. */
export function badAnswer(role: Role, url: string, what: string, cause?: unknown): KvError {
  return new KvError("KV_PROXY_UPSTREAM_FAILED", `the ${role} instance ${url} ${what}`, {
    hint: `see the log of ${url}`,
    details: { role, instance: url },
    cause,
  });
}
