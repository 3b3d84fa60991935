import type { EngineTransferPlan } from "../engine/engine-plan-types.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import type { RemoteRankId, RequestPlan } from "../request/request-plan-types.js";
import { fail } from "./proof-result.js";

const nameOf = ({ tpRank, ppRank }: RemoteRankId) =>
  ppRank === 0 ? `${tpRank}` : `${tpRank} of stage ${ppRank}`;

/**
 * Remote ranks that a local rank notifies for a request: those that it reads, and those that it
 * only notifies.
 */
export function notifiedRanks(
  plan: EngineTransferPlan,
  request: RequestPlan,
): readonly RemoteRankId[] {
  const localRank = plan.local.tpRank;
  // A rank that is read in several transfers (one for each type of memory) is notified once, after
  // all of them.
  const read = new Map(
    request.reads.map(({ remoteRank: tpRank, remotePpRank: ppRank }) => [
      `${ppRank}:${tpRank}`,
      { tpRank, ppRank },
    ]),
  );
  const notified = [...read.values(), ...request.notify];
  const seen = new Set<string>();
  for (const rank of notified) {
    const at = { localRank, remoteRank: rank.tpRank, stage: rank.ppRank };
    const key = `${rank.ppRank}:${rank.tpRank}`;
    if (seen.has(key))
      fail(
        "notification-twice",
        `local rank ${localRank} notifies remote rank ${nameOf(rank)} more than once`,
        at,
      );
    if (rank.tpRank < 0 || rank.tpRank >= plan.remote.tpSize)
      fail(
        "notification-stray",
        `local rank ${localRank} notifies rank ${nameOf(rank)}, and the remote engine has ${plan.remote.tpSize} ranks`,
        at,
      );
    seen.add(key);
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
  const got = new Map<string, number>();
  const awaitedBy = new Map<string, number>();
  for (const [index, plan] of plans.entries()) {
    const request = requests[index];
    if (request === undefined) continue;
    for (const rank of notifiedRanks(plan, request)) {
      const key = `${rank.ppRank}:${rank.tpRank}`;
      got.set(key, (got.get(key) ?? 0) + 1);
      const before = awaitedBy.get(key);
      const awaited = plan.localConsumers;
      if (before !== undefined && before !== awaited) {
        fail(
          "notification-count",
          `notifications tell remote rank ${nameOf(rank)} to await ${before} and ${awaited} notifications`,
          { remoteRank: rank.tpRank, one: before, other: awaited },
        );
      }
      awaitedBy.set(key, awaited);
    }
  }
  for (const { tpRank, ppRank = 0 } of remotes) {
    const [count, awaited] = [
      got.get(`${ppRank}:${tpRank}`) ?? 0,
      awaitedBy.get(`${ppRank}:${tpRank}`),
    ];
    const name = nameOf({ tpRank, ppRank });
    if (awaited === undefined) {
      fail(
        "notification-missing",
        `remote rank ${name} holds the request's blocks and gets no notification`,
        { remoteRank: tpRank },
      );
    }
    if (awaited === count) continue;
    fail(
      count < awaited ? "notification-missing" : "notification-count",
      `remote rank ${name} gets ${count} notifications about a request and awaits ${awaited}`,
      { remoteRank: tpRank, awaited, sent: count },
    );
  }
}
