import type { PeerHold, Peers, TransferMetrics } from "@kv/connector";
import { type Clock, KvError, type Log } from "@kv/interface";
import { consumerLink } from "./acquire-consumer.js";
import type { Offer } from "../control.js";
import type { WriteLink } from "./consumer-link.js";

/** Does something with the link to the consumer that made an offer, in its time. */
export interface WriteRuns {
  /** The error that it ended with, if it did; never rejects. `unwanted`: the consumer took its offer back, so nothing has gone wrong. */
  run(
    offer: Offer,
    requestId: string,
    controller: AbortController,
    body: (link: WriteLink) => Promise<void>,
    unwanted?: () => boolean,
  ): Promise<KvError | undefined>;
}

export interface WriteRunsOptions {
  readonly clock: Clock;
  readonly log: Log;
  readonly metrics: TransferMetrics;
  readonly peers: Peers<WriteLink>;
  /** From the begin to the last byte, the handshake included. */
  readonly writeTimeoutMs: number;
}

/** Failures that say that what is known of a consumer is out of date. */
const PEER_LOST = [
  "KV_PEER_DISCONNECTED",
  "KV_AGENT_UNKNOWN_REMOTE",
  "KV_TRANSFER_FAILED",
  "KV_TRANSFER_TIMEOUT",
  "KV_NOTIFICATION_FAILED",
];

export function createWriteRuns(options: WriteRunsOptions): WriteRuns {
  const { clock, log, metrics, peers, writeTimeoutMs } = options;

  function timedOut({ wireId, engineId }: Offer): KvError {
    return new KvError(
      "KV_TRANSFER_TIMEOUT",
      `the KV of request ${wireId} was not written to engine ${engineId} within ${writeTimeoutMs} ms`,
      { details: { engineId, timeoutMs: writeTimeoutMs } },
    );
  }

  return {
    async run(offer, requestId, controller, body, unwanted = () => false) {
      const timer = clock.setTimer(() => controller.abort(timedOut(offer)), writeTimeoutMs);
      let hold: PeerHold<WriteLink> | undefined;
      try {
        controller.signal.throwIfAborted();
        hold = await consumerLink(offer, peers, controller.signal);
        await body(hold.peer);
        return undefined;
      } catch (thrown) {
        const error = KvError.from(thrown, "KV_TRANSFER_FAILED", `the WRITE of request ${requestId}`);
        if (!unwanted()) {
          if (hold !== undefined) metrics.transferFailed();
          // vLLM's failure types.
          log.warn(hold === undefined ? "push_handshake_failed" : "transfer_failed", {
            requestId,
            engineId: offer.engineId,
            code: error.code,
            error: error.message,
          });
        }
        if (hold !== undefined && PEER_LOST.includes(error.code)) {
          peers.drop(offer.engineId, error.message, hold.peer);
        }
        return error;
      } finally {
        timer.cancel();
        hold?.release();
      }
    },
  };
}
