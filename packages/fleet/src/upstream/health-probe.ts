import type { Clock } from "@kv/interface";
import type { HealthProbe } from "../health/health-checks.js";
import type { InstanceGet } from "../pairing/engine-facts.js";
import { Deadline } from "../request/deadline.js";
import type { Upstream } from "./upstream.js";

/** Health requests through the proxy's HTTP client. */
export function healthProbe(upstream: Upstream, clock: Clock): HealthProbe {
  const get = instanceGet(upstream, clock);
  return async (request) => (await get(request)).status;
}

/** The proxy's own GETs at an instance. A body is cut after 64 KiB. */
export function instanceGet(upstream: Upstream, clock: Clock): InstanceGet {
  return async ({ role, url, path, timeoutMs }) => {
    const deadline = new Deadline({ clock, requestMs: timeoutMs });
    try {
      const answer = await upstream.send({ role, url, method: "GET", path, headers: {}, abort: deadline });
      const { bytes } = await answer.body.readLimited(64 * 1024);
      answer.discard();
      return { status: answer.status, body: bytes.toString() };
    } finally {
      deadline.close();
    }
  };
}
