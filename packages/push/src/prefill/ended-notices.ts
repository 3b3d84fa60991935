import { type Background, createBackground, type Messages, type Peers } from "@kv/connector";
import type { KvError, Log } from "@kv/interface";
import { consumerLink } from "./acquire-consumer.js";
import { encodeEnded, type Offer } from "../control.js";
import type { WriteLink } from "./consumer-link.js";

/** Tells consumers of ours that nothing of an offer is under way, and that nothing will come; a vLLM one has no word for it. */
export interface ConsumerAnswers extends Background {
  ended(offer: Offer, error: KvError, quiet: Promise<void>): void;
}

export function createConsumerAnswers(options: {
  readonly peers: Peers<WriteLink>;
  readonly messages: Pick<Messages, "send">;
  readonly log: Log;
}): ConsumerAnswers {
  const { peers, messages, log } = options;
  const answers = createBackground();

  async function tell(offer: Offer, error: KvError): Promise<void> {
    const { own, wireId } = offer;
    if (own === undefined) return;
    const { incarnation, generation, rank } = own;
    const { code, message } = error;
    const failed = (reason: unknown) =>
      log.debug("push-answer-failed", { request: wireId, rank, error: String(reason) });
    await consumerLink(offer, peers).then(async ({ peer, release }) => {
      const agent = peer.targets.get(rank)?.agent;
      if (agent !== undefined) {
        const payload = encodeEnded({ wireId, incarnation, generation, code, message });
        await messages.send(agent, payload, failed);
      }
      release();
    }, failed);
  }

  return {
    ...answers,
    get size() {
      return answers.size;
    },
    ended(offer, error, quiet) {
      if (offer.own !== undefined) answers.track(quiet.then(() => tell(offer, error)));
    },
  };
}
