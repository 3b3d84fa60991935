import type { LeaseOrder } from "@kv/connector";
import { KvError } from "@kv/interface";
import type { Offer } from "../control.js";
import type { Deliveries, Delivery } from "./deliveries.js";
import type { Produced } from "./registration-matcher.js";
import type { PeerQueues } from "./queues.js";
import type { Recent } from "./expiring-set.js";
import type { WriteRuns } from "./write-dispatch.js";
import type { WriteBlocks, WritesAhead } from "./layerwise-writes.js";

/** Brings finished requests to the offers that they matched: one WRITE for each offer, in the queue of its consumer. */
export interface Delivering {
  /** An offer and the finished request that it is for. */
  deliver(key: string, offer: Offer, produced: Produced): void;
  /** It is being written, or waits for its turn. */
  isWriting(key: string): boolean;
  /** Gives the WRITE up, for the consumer took its offer back; false when there is none. It is answered when nothing of it is under way. */
  withdraw(key: string, reason: KvError): boolean;
  abortAll(reason: KvError): void;
}

export interface DeliveringOptions {
  readonly deliveries: Deliveries;
  readonly queues: PeerQueues;
  readonly runs: WriteRuns;
  readonly ahead: WritesAhead;
  /** Offers that are over. */
  readonly over: Recent;
  readonly write: WriteBlocks;
  /** The request has not ended in the meantime. */
  isHere(produced: Produced): boolean;
  isLeased(produced: Produced): boolean;
  refuse(key: string, offer: Offer, error: KvError): void;
  answer(key: string, offer: Offer, error: KvError): void;
  /** Every rank of its consumer has its share. */
  sent(produced: Produced): void;
}

interface Write {
  readonly controller: AbortController;
  /** The consumer took its offer back, and waits for an answer. */
  withdrawn: boolean;
}

export function createDelivering(options: DeliveringOptions): Delivering {
  const { deliveries, queues, runs, ahead, over, refuse, answer, sent } = options;
  const writes = new Map<string, Write>();

  function deliver(key: string, offer: Offer, produced: Produced): void {
    if (!options.isHere(produced)) {
      refuse(key, offer, new KvError("KV_GENERATION_STALE", "the request of that name has ended"));
      return;
    }
    let delivery: Delivery;
    try {
      delivery = deliveries.open(produced, offer);
    } catch (error) {
      refuse(key, offer, KvError.from(error, "KV_TOPOLOGY_INVALID", "an offer cannot be served"));
      return;
    }
    const ranks = offer.own === undefined ? delivery.ranks : [offer.own.rank];
    if (!ranks.every((rank) => delivery.ranks.includes(rank))) {
      const served = delivery.ranks.join(", ");
      const message = `rank ${ranks} of engine ${offer.engineId} is not among those that this one serves: ${served}`;
      refuse(key, offer, new KvError("KV_REQUEST_INVALID", message));
      return;
    }
    if (offer.blockIds.length === 0) {
      over.add(key);
      settle(delivery, ranks);
      return;
    }
    const { finished: order } = produced;
    if (order === undefined)
      throw new KvError("KV_INTERNAL", `request ${produced.requestId} is not finished`);
    const write: Write = { controller: new AbortController(), withdrawn: false };
    writes.set(key, write);
    delivery.writing += 1;
    queues.add(offer.engineId, async () => {
      await bring(key, offer, order, ranks, write);
      writes.delete(key);
      over.add(key);
      delivery.writing -= 1;
      settle(delivery, ranks);
    });
  }

  function settle(delivery: Delivery, ranks: readonly number[]): void {
    const { produced } = delivery;
    for (const rank of ranks) delivery.over.add(rank);
    if (delivery.writing > 0 || deliveries.get(produced.wireId) !== delivery) return;
    // A lease that ended in the meantime waits for nobody else.
    if (delivery.over.size === delivery.ranks.length || !options.isLeased(produced)) sent(produced);
  }

  /** What the consumer does not have yet, and the word that it has all of it. */
  async function bring(
    key: string,
    offer: Offer,
    order: LeaseOrder,
    ranks: readonly number[],
    write: Write,
  ): Promise<void> {
    const { signal } = write.controller;
    const has = await ahead.settle(key, order, signal);
    const error = await runs.run(
      offer,
      order.requestId,
      write.controller,
      (link) =>
        options.write(link, ranks, { order, offer }, signal, {
          has: (region) => !has.has(region),
          last: true,
        }),
      () => write.withdrawn,
    );
    if (error !== undefined) answer(key, offer, error);
  }

  return {
    deliver,
    isWriting: (key) => writes.has(key),
    withdraw(key, reason) {
      const write = writes.get(key);
      if (write === undefined) return false;
      write.withdrawn = true;
      write.controller.abort(reason);
      return true;
    },
    abortAll(reason) {
      for (const { controller } of writes.values()) controller.abort(reason);
    },
  };
}
