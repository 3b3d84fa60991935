import {
  createLeases,
  idleWithin,
  type LeaseOrder,
  type Messages,
  type Outbox,
  type Peers,
  type SendableRequest,
  type TransferMetrics,
} from "@kv/connector";
import { type Clock, type ComputedLayer, KvError, type Log } from "@kv/interface";
import { createConsumerAnswers } from "./ended-notices.js";
import type { Offer } from "../control.js";
import { createDeliveries } from "./deliveries.js";
import { createDelivering } from "./finished-requests.js";
import { createGenerationFloors } from "./generation-watermarks.js";
import { createMatching, type Produced } from "./registration-matcher.js";
import { consumerOf, keyOf } from "./offer-names.js";
import { createOfferSweep } from "./offer-sweep.js";
import { createPeerQueues } from "./queues.js";
import { createRecent } from "./expiring-set.js";
import type { WriteLink } from "./consumer-link.js";
import { createWriteRuns } from "./write-dispatch.js";
import { createWritesAhead, type WriteBlocks } from "./layerwise-writes.js";

/**
 * The push writer of a producer's rank: the one owner of offers, finished requests, leases and WRITEs. It acts when something happens (a
 * step, a computed layer, a notification, a handshake or a transfer that ended, a lease that ran out), and never polls: what it waits for
 * will call it. Nothing that it does waits in line behind a handshake or a slow consumer.
 */
export interface PushWriter {
  step(step: WriterStep): void;
  /** Of requests in the batch, these regions are computed: what waits for them may have them. Nothing without `layerwise`. */
  layer(layer: ComputedLayer): void;
  offer(offer: Offer, from: string): void;
  /** The consumer wants nothing written, or nothing any more; answered when nothing of it is under way. */
  withdraw(offer: Offer, from: string): void;
  heartbeat(names: readonly string[]): void;
  outstanding(): {
    batch: number;
    leases: number;
    offers: number;
    writes: number;
    answers: number;
    ahead: number;
  };
  /** Gives everything up, and waits until no WRITE can touch memory any more; not longer than `CLOSE_GRACE_MS`. */
  close(): Promise<void>;
}

export interface WriterStep {
  readonly schedulerClockMs: number;
  readonly incarnation: string;
  readonly inBatch: readonly SendableRequest[];
  readonly notSent: readonly string[];
  readonly leases: readonly LeaseOrder[];
}

export interface PushWriterOptions {
  readonly clock: Clock;
  readonly log: Log;
  readonly metrics: TransferMetrics;
  readonly outbox: Outbox;
  readonly messages: Messages;
  readonly peers: Peers<WriteLink>;
  readonly engineId: string;
  readonly tpRank: number;
  readonly tpSize: number;
  /** What a heartbeat gives. */
  readonly extensionMs: number;
  /** From a match to the last byte, the handshake included. */
  readonly writeTimeoutMs: number;
  /** How long an offer waits for its prompt. */
  readonly offerMs: number;
  /** How long what has ended is remembered. */
  readonly rememberMs: number;
  /** Layer-wise push: names of all regions. Then what ended without anything to send is reported as sent too, when nothing reads it. */
  readonly layerwise?: { readonly regions: readonly string[] };
  readonly write: WriteBlocks;
}

/** A consumer's WRITEs under way at once; the transport takes them one after the other anyway. */
const WRITES_PER_PEER = 8;
const MOST_OFFERS = 65_536;
const MOST_CONSUMERS = 4096;

export function createPushWriter(options: PushWriterOptions): PushWriter {
  const { clock, log, metrics, outbox, messages, peers, layerwise } = options;
  const matching = createMatching({ clock, rememberMs: options.rememberMs, consumerOf });
  const queues = createPeerQueues({ perPeer: WRITES_PER_PEER });
  const runs = createWriteRuns({ clock, log, metrics, peers, writeTimeoutMs: options.writeTimeoutMs });
  const ahead = createWritesAhead({ queues, runs, regions: layerwise?.regions ?? [], write: options.write });
  const answers = createConsumerAnswers({ peers, messages, log });
  const deliveries = createDeliveries(options);
  const floors = createGenerationFloors({ most: MOST_CONSUMERS });
  /** Offers that are over: what names them again is late. */
  const over = createRecent({ clock, rememberMs: options.rememberMs, most: MOST_OFFERS });
  const delivering = createDelivering({
    ...{ deliveries, queues, runs, ahead, over, refuse, answer, sent },
    write: options.write,
    isHere: (produced) => matching.byWireId(produced.wireId) === produced,
    isLeased: (produced) => leases.has(produced.wireId),
  });
  let incarnation: string | undefined;
  let closed = false;
  const sweep = createOfferSweep({
    clock,
    matching,
    offerMs: options.offerMs,
    expired(key, offer) {
      const message = "the prompt did not come to the prefill worker in time";
      refuse(key, offer, new KvError("KV_REQUEST_TIMEOUT", message));
    },
  });
  const leases = createLeases({
    clock,
    extensionMs: options.extensionMs,
    onExpired(wireId) {
      const produced = matching.byWireId(wireId);
      if (produced === undefined) return;
      // What is being written is waited for; what nobody has asked for goes.
      const delivery = deliveries.get(wireId);
      if (delivery !== undefined && delivery.writing > 0) return;
      metrics.leaseExpired();
      log.warn("lease-expired", { requestId: produced.requestId, ranks: delivery?.over.size ?? 0 });
      sent(produced);
    },
  });

  function sent(produced: Produced): void {
    leases.release(produced.wireId);
    deliveries.delete(produced.wireId);
    free(produced);
  }

  /** The engine may have the blocks back when nothing reads them any more. */
  function free(produced: Produced): void {
    matching.end(produced);
    const reading = ahead.release(produced);
    if (reading === undefined) outbox.sent(produced.requestId);
    else answers.track(reading.then(() => outbox.sent(produced.requestId)));
  }

  function refuse(key: string, offer: Offer, error: KvError): void {
    over.add(key);
    const { wireId: request, engineId } = offer;
    log.info("push-refused", { request, engineId, code: error.code, error: error.message });
    answer(key, offer, error);
  }

  function answer(key: string, offer: Offer, error: KvError): void {
    if (!closed) answers.ended(offer, error, ahead.giveUp(key, error));
  }

  /** False for what is late, or another engine's: it was answered. */
  function isTimely(key: string, offer: Offer): boolean {
    const { own } = offer;
    if (offer.producerEngineId !== options.engineId) {
      const message = `this is engine ${options.engineId}, the registration is for engine ${offer.producerEngineId}`;
      refuse(key, offer, new KvError("KV_HANDSHAKE_WRONG_ENGINE", message));
      return false;
    }
    if (own === undefined) return true;
    const process = JSON.stringify([offer.engineId, own.incarnation]);
    if (floors.isOpen(process, own.generation, own.oldestOpen)) return true;
    const message = `generation ${own.generation} of its blocks is over`;
    refuse(key, offer, new KvError("KV_GENERATION_STALE", message));
    return false;
  }

  function offered(key: string, offer: Offer, from: string): void {
    const match = matching.find(offer, incarnation);
    if (match.kind === "produced") delivering.deliver(key, offer, match.produced);
    else if (match.kind === "gone") refuse(key, offer, new KvError("KV_GENERATION_STALE", match.why));
    else if (matching.offers >= MOST_OFFERS) {
      log.error("push-offers-full", { from, offers: matching.offers });
      refuse(key, offer, new KvError("KV_REQUEST_INVALID", `more than ${MOST_OFFERS} registrations wait`));
    } else {
      matching.wait(key, offer);
      sweep.arm();
    }
  }

  function finished(order: LeaseOrder, schedulerClockMs: number): void {
    const produced = matching.finish(order);
    const nowMs = clock.now();
    // What is left of the lease counts from here: the way from the scheduler only lengthens it, which is the safe side.
    const rebase = (atMs: number) => nowMs + (atMs - schedulerClockMs);
    leases.grant(order.wireId, {
      expiresAtMs: rebase(order.expiresAtMs),
      ...(order.unattendedExpiresAtMs === undefined
        ? {}
        : { unattendedExpiresAtMs: rebase(order.unattendedExpiresAtMs) }),
    });
    for (const [key, offer] of matching.takeOffersFor(produced)) delivering.deliver(key, offer, produced);
  }

  function notSent(requestId: string): void {
    const produced = matching.byRequestId(requestId);
    if (layerwise === undefined) {
      if (produced !== undefined) matching.end(produced);
    } else if (produced !== undefined) free(produced);
    for (const [key, offer] of matching.takeOffersNaming(requestId)) {
      const message = `request ${requestId} ended at the prefill worker before its prompt was computed`;
      refuse(key, offer, new KvError("KV_REQUEST_ABORTED", message));
    }
  }

  return {
    step(step) {
      incarnation = step.incarnation;
      for (const order of step.inBatch) matching.admit(order);
      for (const requestId of step.notSent) notSent(requestId);
      for (const order of step.leases) finished(order, step.schedulerClockMs);
      sweep.arm();
    },
    layer({ regions, computedTokens }) {
      if (closed || layerwise === undefined) return;
      for (const [requestId, tokens] of Object.entries(computedTokens)) {
        const produced = matching.byRequestId(requestId);
        const { numTokens, promptBlockIds } = produced?.order ?? {};
        if (produced === undefined || produced.finished !== undefined) continue;
        // Chunks of a prompt go with its last one: only then is a layer of it whole.
        if (promptBlockIds === undefined || numTokens === undefined || tokens < numTokens) continue;
        ahead.computed(produced, regions, matching.offersFor(produced));
      }
    },
    offer(offer, from) {
      const key = keyOf(offer);
      // Both ranks of a vLLM consumer send the same; and what arrives twice is one thing.
      if (closed || delivering.isWriting(key) || over.has(key) || matching.waiting(key) !== undefined) return;
      if (isTimely(key, offer)) offered(key, offer, from);
    },
    withdraw(offer, from) {
      if (closed) return;
      const key = keyOf(offer);
      const error = new KvError("KV_REQUEST_ABORTED", `request ${offer.wireId} was withdrawn`);
      // It answers when the last transfer has let go.
      if (delivering.withdraw(key, error)) return;
      matching.takeOffer(key);
      if (over.has(key)) {
        answer(key, offer, error);
        return;
      }
      if (!isTimely(key, offer)) return;
      // The offer itself may come after this: it is over.
      over.add(key);
      answer(key, offer, error);
      offered(`${key} nothing`, offer, from);
    },
    heartbeat(names) {
      for (const name of names) {
        // Our own consumers know the wire id; vLLM's name the request as the proxy did.
        leases.extend(matching.byWireId(name) === undefined ? wireIdsNamed(name) : [name]);
      }
    },
    outstanding: () => ({
      batch: matching.produced,
      leases: leases.size,
      offers: matching.offers,
      writes: queues.size,
      answers: answers.size,
      ahead: ahead.size,
    }),
    async close() {
      closed = true;
      leases.close();
      sweep.close();
      ahead.close();
      delivering.abortAll(new KvError("KV_AGENT_CLOSED", "the worker was closed"));
      if (!(await idleWithin(clock, [queues]))) log.warn("close-did-not-wait", { writes: queues.size });
      matching.clear();
      deliveries.clear();
    },
  };

  function* wireIdsNamed(name: string): Iterable<string> {
    for (const { wireId } of matching.named(name)) yield wireId;
  }
}
