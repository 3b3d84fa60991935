import type { Clock, Timer } from "@kv/interface";

/**
 * Keeps the leases of requests that wait or transfer on a decode worker alive: every interval, one message per engine with
 * the ids that its producer knows. The set comes whole from the scheduler side, whenever it changes; between steps the
 * timer goes on, so that an idle engine does not lose its leases.
 */
export interface Heartbeats<Target extends HeartbeatTarget> {
  /** Replaces the set. What is new in it is heard of at once when the last beat is an interval ago, else with the next. */
  replace(targets: readonly Target[]): void;
  /** Requests that are kept alive. */
  readonly size: number;
  close(): void;
}

export interface HeartbeatTarget {
  readonly engineId: string;
  /** Ids as the producer knows them. */
  readonly remoteRequestIds: readonly string[];
}

export interface HeartbeatsOptions<Target extends HeartbeatTarget> {
  readonly clock: Clock;
  /** vLLM 0.33: lease / 6. */
  readonly intervalMs: number;
  /** Sends one beat; never throws, and is not waited for. */
  beat(target: Target): void;
}

export function createHeartbeats<Target extends HeartbeatTarget>({
  clock,
  intervalMs,
  beat,
}: HeartbeatsOptions<Target>): Heartbeats<Target> {
  let targets: readonly Target[] = [];
  let timer: Timer | undefined;
  let lastMs = Number.NEGATIVE_INFINITY;

  function run(): void {
    timer = undefined;
    if (targets.length === 0) return;
    lastMs = clock.now();
    for (const target of targets) beat(target);
    timer = clock.setTimer(run, intervalMs);
  }

  return {
    replace(next) {
      targets = next.filter((target) => target.remoteRequestIds.length > 0);
      if (targets.length === 0) {
        timer?.cancel();
        timer = undefined;
        return;
      }
      const dueInMs = lastMs + intervalMs - clock.now();
      if (dueInMs <= 0) {
        timer?.cancel();
        run();
      } else {
        timer ??= clock.setTimer(run, dueInMs);
      }
    },
    get size() {
      return targets.reduce((sum, target) => sum + target.remoteRequestIds.length, 0);
    },
    close() {
      targets = [];
      timer?.cancel();
      timer = undefined;
    },
  };
}
