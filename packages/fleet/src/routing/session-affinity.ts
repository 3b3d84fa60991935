import { createHash } from "node:crypto";
import { type Instance, instanceName } from "../instances/instance.js";
import { leastLoad, type Routing, type RoutingContext } from "./routing.js";

/**
 * Sends the requests of a session to one instance by rendezvous hashing: an instance that comes or goes moves only its own sessions. The
 * session is the header `X-Session-Id`, else `session_id` or `user` in the body. A request without one goes to the least loaded instance.
 */
export function sessionAffinity(): Routing {
  const withoutSession = leastLoad();
  /** The candidates of the last choice, with the hashes of their names. They are the same list while no instance changes. */
  let known: readonly Instance[] = [];
  let names = new Uint32Array();
  return {
    name: "session-affinity",
    choose(candidates, context) {
      const session = sessionOf(context);
      if (session === undefined) return withoutSession.choose(candidates, context);
      if (candidates !== known) {
        known = candidates;
        names = Uint32Array.from(candidates, (candidate) => hashOf(instanceName(candidate)));
      }
      const own = hashOf(session);
      let chosen = 0;
      let highest = -1;
      for (let at = 0; at < names.length; at += 1) {
        const score = mixed(own, names[at] ?? 0);
        if (score <= highest) continue;
        highest = score;
        chosen = at;
      }
      return candidates[chosen];
    },
  };
}

function hashOf(text: string): number {
  return createHash("sha1").update(text).digest().readUInt32LE();
}

/** A number of 32 bits that depends on every bit of both. */
function mixed(one: number, other: number): number {
  let mixing = Math.imul(one ^ (one >>> 16), 0x85ebca6b) ^ other;
  mixing = Math.imul(mixing ^ (mixing >>> 13), 0xc2b2ae35);
  mixing = Math.imul(mixing ^ (mixing >>> 16), 0x9e3779b1);
  return (mixing ^ (mixing >>> 15)) >>> 0;
}

function sessionOf({ headers, request }: RoutingContext): string | undefined {
  const { session_id: id, user } = request?.fields ?? {};
  return [headers?.["x-session-id"], id, user].find(
    (value): value is string => typeof value === "string" && value !== "",
  );
}
