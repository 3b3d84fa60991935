import type { Messages, RankKey, RemoteLink, TransferMetrics } from "@kv/connector";
import type { Log } from "@kv/interface";
import { encodeNotification } from "@kv/protocol";

/** What a decode worker says to the producers it reads from. None of it is waited for, and none of it throws: a lost word costs a lease. */
export interface Readers {
  /** `"{id}:{n}"`, n being how many local ranks the producer's rank has to hear. */
  notification(link: RemoteLink, wireId: string): Uint8Array;
  /** Tells these ranks that this one is done with the request. */
  tell(link: RemoteLink, wireId: string, ranks: Iterable<RankKey>): void;
}

export interface ReadersOptions {
  readonly messages: Pick<Messages, "send">;
  readonly log: Log;
  readonly metrics: TransferMetrics;
}

export function createReaders({ messages, log, metrics }: ReadersOptions): Readers {
  const notification: Readers["notification"] = (link, requestId) =>
    encodeNotification({ kind: "done", requestId, readers: link.plan.localConsumers });

  return {
    notification,
    tell(link, wireId, ranks) {
      const payload = notification(link, wireId);
      for (const rank of ranks) {
        const name = link.agents.get(rank);
        if (name === undefined) continue;
        void messages.send(name, payload, (error) => {
          metrics.notificationFailed();
          // vLLM's failure type; the producer frees when its lease runs out.
          log.warn("notification_failed", { requestId: wireId, remoteRank: rank, error: String(error) });
        });
      }
    },
  };
}
