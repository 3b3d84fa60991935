import { createHash } from "node:crypto";
import { leastLoad } from "./least-load.js";
import type { Routing, RoutingContext } from "./routing.js";

/**
 * Requests of a session go to one instance: by rendezvous hashing, so that an instance that comes or goes moves only its own sessions.
 * The session is `X-Session-Id`, else `session_id` or `user` in the body; a request without one goes where the least load is.
 */
export function sessionAffinity(): Routing {
  const others = leastLoad();
  return {
    name: "session-affinity",
    choose(candidates, context) {
      const session = sessionOf(context);
      if (session === undefined) return others.choose(candidates, context);
      let chosen = candidates[0];
      let highest = "";
      for (const candidate of candidates) {
        const rank = candidate.dataParallelRank ?? "";
        const score = createHash("sha1").update(`${session}\0${candidate.url}\0${rank}`).digest("hex");
        if (score <= highest) continue;
        highest = score;
        chosen = candidate;
      }
      return chosen;
    },
  };
}

function sessionOf({ headers, request }: RoutingContext): string | undefined {
  const { session_id: id, user } = request?.fields ?? {};
  return [headers?.["x-session-id"], id, user].find(
    (value): value is string => typeof value === "string" && value !== "",
  );
}
