import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import type { RemoteRankId, RequestPlan } from "../request/request-plan.js";
import { fail } from "./proof-result.js";

const nameOf = ({ tpRank, ppRank }: RemoteRankId) =>
  ppRank === 0 ? `${tpRank}` : `${tpRank} of stage ${ppRank}`;

/**
 * The names of the remote ranks that a local rank notifies for a request: those that it reads, and
 * those that it only notifies. Ends the proof where it notifies a rank twice, or one that does not
 * exist.
 */
export function notifiedRanks(plan: EngineTransferPlan, request: RequestPlan): Set<string> {
  const localRank = plan.local.tpRank;
  // A rank that is read in several transfers (one for each type of memory) is notified once, after
  // all of them.
  const read = request.reads.map(({ remoteRank: tpRank, remotePpRank: ppRank }) =>
    nameOf({ tpRank, ppRank }),
  );
  const notified = new Set(read);
  for (const rank of request.notify) {
    const [name, at] = [nameOf(rank), { localRank, remoteRank: rank.tpRank, stage: rank.ppRank }];
    if (notified.has(name))
      fail(
        "notification-twice",
        `local rank ${localRank} notifies remote rank ${name} more than once`,
        at,
      );
    if (rank.tpRank < 0 || rank.tpRank >= plan.remote.tpSize)
      fail(
        "notification-stray",
        `local rank ${localRank} notifies rank ${name}, and the remote engine has ${plan.remote.tpSize} ranks`,
        at,
      );
    notified.add(name);
  }
  return notified;
}

/**
 * Proves that each remote rank gets as many notifications about a request, over all local ranks, as
 * it awaits. The notifications themselves carry the number: a remote rank frees the blocks after
 * that many.
 */
export function proveNotifications(
  plans: readonly EngineTransferPlan[],
  remotes: readonly RankGeometry[],
  requests: readonly RequestPlan[],
): void {
  const notified = plans.map((plan, index) => notifiedRanks(plan, requests[index] as RequestPlan));
  for (const { tpRank: remoteRank, ppRank = 0 } of remotes) {
    const name = nameOf({ tpRank: remoteRank, ppRank });
    const awaited = plans
      .filter((_, index) => notified[index]?.has(name))
      .map(({ localConsumers }) => localConsumers);
    const [one, sent] = [awaited[0], awaited.length];
    if (one === undefined)
      fail(
        "notification-missing",
        `remote rank ${name} holds the request's blocks and gets no notification`,
        { remoteRank },
      );
    const other = awaited.find((count) => count !== one);
    if (other !== undefined)
      fail(
        "notification-count",
        `notifications tell remote rank ${name} to await ${one} and ${other} notifications`,
        { remoteRank, one, other },
      );
    if (one !== sent)
      fail(
        sent < one ? "notification-missing" : "notification-count",
        `remote rank ${name} gets ${sent} notifications about a request and awaits ${one}`,
        { remoteRank, awaited: one, sent },
      );
  }
}
