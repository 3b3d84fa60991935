import { createHash } from "node:crypto";
import { leastLoad, type Routing, type RoutingContext } from "./routing.js";

/**
 * Sends the requests of a session to one instance by rendezvous hashing: an instance that comes or goes moves only its own sessions. The
 * session is the header `X-Session-Id`, else `session_id` or `user` in the body. A request without one goes to the least loaded instance.
 */
export function sessionAffinity(): Routing {
  const withoutSession = leastLoad();
  return {
    name: "session-affinity",
    choose(candidates, context) {
      const session = sessionOf(context);
      if (session === undefined) return withoutSession.choose(candidates, context);
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
