import type { EngineTransferPlan } from "../engine/engine-plan-types.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import type { RemoteRankId, RequestPlan } from "../request/request-plan-types.js";
import { fail } from "./proof-result.js";

const nameOf = ({ tpRank, ppRank }: RemoteRankId) =>
  ppRank === 0 ? `${tpRank}` : `${tpRank} of stage ${ppRank}`;

/** Remote ranks that a request of this local rank tells: those it reads, and those it only notifies. */
export function notifiedRanks(plan: EngineTransferPlan, request: RequestPlan): readonly RemoteRankId[] {
  const localRank = plan.local.tpRank;
  // A rank that is read in several transfers (types of memory) is told once, after all of them.
  const read = new Map(
    request.reads.map(({ remoteRank: tpRank, remotePpRank: ppRank }) => [
      `${ppRank}:${tpRank}`,
      { tpRank, ppRank },
    ]),
  );
  const told = [...read.values(), ...request.notify];
  const seen = new Set<string>();
  for (const rank of told) {
    const at = { localRank, remoteRank: rank.tpRank, stage: rank.ppRank };
    const key = `${rank.ppRank}:${rank.tpRank}`;
    if (seen.has(key))
      fail(
        "notification-twice",
        `local rank ${localRank} tells remote rank ${nameOf(rank)} more than once`,
        at,
      );
    if (rank.tpRank < 0 || rank.tpRank >= plan.remote.tpSize)
      fail(
        "notification-stray",
        `local rank ${localRank} tells rank ${nameOf(rank)} of ${plan.remote.tpSize}`,
        at,
      );
    seen.add(key);
  }
  return told;
}

/**
 * Counts over all local ranks what each remote rank is told about one request, against what it waits for. Of what is read, the notifications
 * themselves carry the count: a remote rank frees after that many. Of what is written, the reader works it out of both engines' sizes: the
 * writer's stages times its ranks to one of the reader's (vLLM 0.33, `_get_new_notifs` of the push worker).
 */
export function proveNotifications(
  plans: readonly EngineTransferPlan[],
  remotes: readonly RankGeometry[],
  requests: readonly RequestPlan[],
): void {
  const got = new Map<string, number>();
  const said = new Map<string, number>();
  for (const [index, plan] of plans.entries()) {
    const request = requests[index];
    if (request === undefined) continue;
    for (const rank of notifiedRanks(plan, request)) {
      const key = `${rank.ppRank}:${rank.tpRank}`;
      got.set(key, (got.get(key) ?? 0) + 1);
      const before = said.get(key);
      const awaited = plan.localConsumers;
      if (before !== undefined && before !== awaited) {
        fail(
          "notification-count",
          `remote rank ${nameOf(rank)} is told to wait for ${before} and for ${awaited} notifications`,
          { remoteRank: rank.tpRank, one: before, other: awaited },
        );
      }
      said.set(key, awaited);
    }
  }
  for (const { tpRank, ppRank = 0 } of remotes) {
    const [count, awaited] = [got.get(`${ppRank}:${tpRank}`) ?? 0, said.get(`${ppRank}:${tpRank}`)];
    const name = nameOf({ tpRank, ppRank });
    if (awaited === undefined) {
      fail(
        "notification-missing",
        `remote rank ${name} holds the request's blocks and nobody tells it that they were read`,
        {
          remoteRank: tpRank,
        },
      );
    }
    if (awaited === count) continue;
    fail(
      count < awaited ? "notification-missing" : "notification-count",
      `remote rank ${name} gets ${count} notifications about a request and waits for ${awaited}`,
      { remoteRank: tpRank, awaited, sent: count },
    );
  }
}
