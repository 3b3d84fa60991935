import type { Agent, Log } from "@kv/interface";
import type { PullMetrics } from "./pull-metrics.js";
import type { RemoteLink } from "./remote-link.js";

/** What a decode worker says to the producers it reads from. None of it is waited for, and none of it throws: a lost word costs a lease. */
export interface Readers {
  /** `"{id}:{n}"`, n being how many local ranks the producer's rank has to hear. */
  notification(link: RemoteLink, wireId: string): Uint8Array;
  /** Tells these ranks that this one is done with the request. */
  tell(link: RemoteLink, wireId: string, tpRanks: Iterable<number>): void;
  /** Keeps the requests' leases alive, with all of the engine's ranks that this one knows; true when the transport took them all. */
  beat(link: RemoteLink, wireIds: readonly string[]): Promise<boolean>;
  /** Resolves when everything said so far was handed over or was lost. */
  drained(): Promise<void>;
  readonly pending: number;
}

export interface ReadersOptions {
  readonly agent: Agent;
  readonly log: Log;
  readonly metrics: PullMetrics;
  encodeDone(wireId: string, consumers: number): Uint8Array;
  encodeHeartbeats(wireIds: readonly string[]): readonly Uint8Array[];
}

export function createReaders(options: ReadersOptions): Readers {
  const { agent, log, metrics } = options;
  const pending = new Set<Promise<boolean>>();

  function send(name: string, payload: Uint8Array, failed: (error: unknown) => void): Promise<boolean> {
    const sent = agent
      .notify(name, payload)
      .then(
        () => true,
        (error: unknown) => {
          failed(error);
          return false;
        },
      )
      .finally(() => pending.delete(sent));
    pending.add(sent);
    return sent;
  }

  const notification: Readers["notification"] = (link, wireId) =>
    options.encodeDone(wireId, link.plan.localConsumers);

  return {
    notification,
    tell(link, wireId, tpRanks) {
      const payload = notification(link, wireId);
      for (const rank of tpRanks) {
        const name = link.agents.get(rank);
        if (name === undefined) continue;
        void send(name, payload, (error) => {
          metrics.notificationFailed();
          // vLLM's failure type; the producer frees when its lease runs out.
          log.warn("notification_failed", { requestId: wireId, remoteRank: rank, error: String(error) });
        });
      }
    },
    async beat(link, wireIds) {
      const sent: Promise<boolean>[] = [];
      for (const payload of options.encodeHeartbeats(wireIds)) {
        for (const name of new Set(link.agents.values())) {
          const failed = (error: unknown) =>
            log.debug("heartbeat-failed", { agent: name, error: String(error) });
          sent.push(send(name, payload, failed));
        }
      }
      return (await Promise.all(sent)).every(Boolean);
    },
    async drained() {
      while (pending.size > 0) await Promise.all(pending);
    },
    get pending() {
      return pending.size;
    },
  };
}
