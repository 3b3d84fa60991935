import type { HealthProbe } from "@kv/fleet";
import type { Clock } from "@kv/interface";
import { Deadline } from "../request/deadline.js";
import type { Upstream } from "./upstream.js";

/** Health requests through the proxy's HTTP client. */
export function healthProbe(upstream: Upstream, clock: Clock): HealthProbe {
  return async ({ role, url, path, timeoutMs }) => {
    const deadline = new Deadline({ clock, requestMs: timeoutMs });
    try {
      const answer = await upstream.send({ role, url, method: "GET", path, headers: {}, abort: deadline });
      await answer.body.readLimited(64 * 1024);
      answer.discard();
      return answer.status;
    } finally {
      deadline.close();
    }
  };
}
