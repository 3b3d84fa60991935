import type { EngineTransferPlan } from "../engine-plan-types.js";
import type { RequestPlan } from "../request-plan-types.js";
import { fail } from "./verdict.js";

/** Remote ranks that a request of this local rank reads or notifies; each once, since each would be told by every mention. */
export function ranksTold(plan: EngineTransferPlan, request: RequestPlan): readonly number[] {
  const told = [...request.reads.map((read) => read.remoteRank), ...request.notifyRanks];
  const seen = new Set<number>();
  for (const rank of told) {
    if (seen.has(rank))
      fail("notification-twice", `local rank ${plan.local.tpRank} tells remote rank ${rank} more than once`, {
        localRank: plan.local.tpRank,
        remoteRank: rank,
      });
    if (rank < 0 || rank >= plan.remote.tpSize)
      fail(
        "notification-stray",
        `local rank ${plan.local.tpRank} tells rank ${rank} of ${plan.remote.tpSize}`,
        {
          localRank: plan.local.tpRank,
          remoteRank: rank,
        },
      );
    seen.add(rank);
  }
  return told;
}

/**
 * Counts over all local ranks what each remote rank is told about one request, against the count that the notifications themselves carry:
 * a remote rank frees after that many.
 */
export function proveNotifications(
  plans: readonly EngineTransferPlan[],
  requests: readonly RequestPlan[],
): void {
  const remoteTpSize = plans[0]?.remote.tpSize ?? 0;
  const got = new Array<number>(remoteTpSize).fill(0);
  const said = new Map<number, number>();
  for (const [index, plan] of plans.entries()) {
    const request = requests[index];
    if (request === undefined) continue;
    for (const rank of ranksTold(plan, request)) {
      got[rank] = (got[rank] ?? 0) + 1;
      const before = said.get(rank);
      if (before !== undefined && before !== plan.localConsumers) {
        fail(
          "notification-count",
          `remote rank ${rank} is told to wait for ${before} and for ${plan.localConsumers} notifications`,
          {
            remoteRank: rank,
            one: before,
            other: plan.localConsumers,
          },
        );
      }
      said.set(rank, plan.localConsumers);
    }
  }
  for (const [rank, count] of got.entries()) {
    const awaited = said.get(rank);
    if (awaited === undefined) {
      fail(
        "notification-missing",
        `remote rank ${rank} holds the request's blocks and nobody tells it that they were read`,
        {
          remoteRank: rank,
        },
      );
    }
    if (awaited === count) continue;
    fail(
      count < awaited ? "notification-missing" : "notification-count",
      `remote rank ${rank} gets ${count} notifications about a request and waits for ${awaited}`,
      { remoteRank: rank, awaited, sent: count },
    );
  }
}
