import {
  createLeases,
  type LeaseOrder,
  type Messages,
  type Outbox,
  type PeerAddress,
  type PeerHold,
  type Peers,
  type SendableRequest,
  type TransferMetrics,
  whileWanted,
} from "@kv/connector";
import { type Clock, KvError, type Log, type Timer } from "@kv/interface";
import { encodeEnded, type Offer } from "./control.js";
import { createMatching, type Produced } from "./matching.js";
import { createPeerQueues } from "./queues.js";
import { createRecent } from "./recent.js";
import { ranksServed, type WriteLink } from "./write-link.js";

/**
 * The push writer of a producer's rank: the one owner of offers, finished requests, leases and WRITEs. It acts when something happens (a
 * step, a notification, a handshake or a transfer that ended, a lease that ran out), and never polls: what it waits for will
 * call it. Nothing that it does waits in line behind a handshake or a slow consumer.
 */
export interface PushWriter {
  step(step: WriterStep): void;
  offer(offer: Offer, from: string): void;
  /** The consumer wants nothing written, or nothing any more; answered when nothing of it is under way. */
  withdraw(offer: Offer, from: string): void;
  heartbeat(names: readonly string[]): void;
  outstanding(): { batch: number; leases: number; offers: number; writes: number; answers: number };
  /** Gives everything up, and waits until no WRITE can touch memory any more; not longer than 10 s. */
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
  write(
    link: WriteLink,
    ranks: readonly number[],
    pair: { order: LeaseOrder; offer: Offer },
    signal: AbortSignal,
  ): Promise<void>;
}

/** A consumer's WRITEs under way at once; the transport takes them one after the other anyway. */
const WRITES_PER_PEER = 8;
const MOST_OFFERS = 65_536;
const MOST_CONSUMERS = 4096;
const CLOSE_GRACE_MS = 10_000;
/** Failures that say that what is known of a consumer is out of date. */
const PEER_LOST = [
  "KV_PEER_DISCONNECTED",
  "KV_AGENT_UNKNOWN_REMOTE",
  "KV_TRANSFER_FAILED",
  "KV_TRANSFER_TIMEOUT",
  "KV_NOTIFICATION_FAILED",
];

/** A finished request and the ranks of its consumer. */
interface Delivery {
  readonly produced: Produced;
  readonly ranks: readonly number[];
  readonly over: Set<number>;
  writing: number;
}

interface Write {
  readonly controller: AbortController;
  /** The consumer took its offer back, and waits for an answer. */
  withdrawn: boolean;
}

export function createPushWriter(options: PushWriterOptions): PushWriter {
  const { clock, log, metrics, outbox, messages, peers } = options;
  const matching = createMatching({ clock, rememberMs: options.rememberMs, consumerOf });
  const queues = createPeerQueues({ perPeer: WRITES_PER_PEER });
  const deliveries = new Map<string, Delivery>();
  const writes = new Map<string, Write>();
  const answers = new Set<Promise<void>>();
  /** Offers that are over: what names them again is late. */
  const over = createRecent({ clock, rememberMs: options.rememberMs, most: MOST_OFFERS });
  /** Of each consumer process, the oldest generation that may be open. */
  const floors = new Map<string, number>();
  let incarnation: string | undefined;
  let sweepTimer: Timer | undefined;
  let closed = false;
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
    matching.end(produced);
    outbox.sent(produced.requestId);
  }

  function deliveryOf(produced: Produced, offer: Offer): Delivery {
    const known = deliveries.get(produced.wireId);
    if (known !== undefined) return known;
    const ranks = ranksServed({ tpRank: options.tpRank, tpSize: options.tpSize }, offer.tpSize);
    const delivery: Delivery = { produced, ranks, over: new Set(), writing: 0 };
    produced.consumer = consumerOf(offer);
    deliveries.set(produced.wireId, delivery);
    return delivery;
  }

  /** An offer and the finished request that it is for. */
  function deliver(key: string, offer: Offer, produced: Produced): void {
    if (matching.byWireId(produced.wireId) !== produced) {
      refuse(key, offer, new KvError("KV_GENERATION_STALE", "the request of that name has ended"));
      return;
    }
    let delivery: Delivery;
    try {
      delivery = deliveryOf(produced, offer);
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
      await run(key, offer, order, ranks, write);
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
    if (delivery.over.size === delivery.ranks.length || !leases.has(produced.wireId)) sent(produced);
  }

  async function run(
    key: string,
    offer: Offer,
    order: LeaseOrder,
    ranks: readonly number[],
    write: Write,
  ): Promise<void> {
    const { controller } = write;
    const timer = clock.setTimer(
      () => controller.abort(timedOut(offer, options.writeTimeoutMs)),
      options.writeTimeoutMs,
    );
    let hold: PeerHold<WriteLink> | undefined;
    try {
      controller.signal.throwIfAborted();
      hold = await freshTarget(offer, controller.signal);
      await options.write(hold.peer, ranks, { order, offer }, controller.signal);
    } catch (thrown) {
      const error = KvError.from(thrown, "KV_TRANSFER_FAILED", `the WRITE of request ${order.requestId}`);
      if (!write.withdrawn) {
        if (hold !== undefined) metrics.transferFailed();
        // vLLM's failure types.
        log.warn(hold === undefined ? "push_handshake_failed" : "transfer_failed", {
          requestId: order.requestId,
          engineId: offer.engineId,
          code: error.code,
          error: error.message,
        });
      }
      if (hold !== undefined && PEER_LOST.includes(error.code)) {
        peers.drop(offer.engineId, error.message, hold.peer);
      }
      answer(key, offer, error);
    } finally {
      timer.cancel();
      hold?.release();
    }
  }

  /** The link to the very process that made the offer. */
  async function freshTarget(offer: Offer, signal: AbortSignal): Promise<PeerHold<WriteLink>> {
    for (let again = false; ; again = true) {
      const hold = await whileWanted(peers.acquire(addressOf(offer)), signal);
      const { incarnation: known } = hold.peer;
      if (offer.own === undefined || known === offer.own.incarnation) return hold;
      hold.release();
      if (again) {
        throw new KvError(
          "KV_GENERATION_STALE",
          `request ${offer.wireId} was registered by an engine ${offer.engineId} that is gone; another process answers at ${offer.host}:${offer.port}`,
        );
      }
      peers.drop(offer.engineId, "another process answers in its place", hold.peer);
    }
  }

  function refuse(key: string, offer: Offer, error: KvError): void {
    over.add(key);
    log.info("push-refused", {
      request: offer.wireId,
      engineId: offer.engineId,
      code: error.code,
      error: error.message,
    });
    answer(key, offer, error);
  }

  /** Tells a consumer of ours that nothing of its offer is under way, and that nothing will come; a vLLM one has no word for it. */
  function answer(key: string, offer: Offer, error: KvError): void {
    const { own } = offer;
    if (own === undefined || closed) return;
    const payload = encodeEnded({
      wireId: offer.wireId,
      incarnation: own.incarnation,
      generation: own.generation,
      code: error.code,
      message: error.message,
    });
    const failed = (reason: unknown) =>
      log.debug("push-answer-failed", { request: offer.wireId, key, error: String(reason) });
    const told = peers.acquire(addressOf(offer)).then(async ({ peer, release }) => {
      const agent = peer.targets.get(own.rank)?.agent;
      if (agent !== undefined && peer.incarnation === own.incarnation) {
        await messages.send(agent, payload, failed);
      }
      release();
    }, failed);
    const tracked: Promise<void> = told.finally(() => answers.delete(tracked));
    answers.add(tracked);
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
    const process = processOf(offer.engineId, own.incarnation);
    const floor = Math.max(floors.get(process) ?? 0, own.oldestOpen);
    floors.delete(process);
    floors.set(process, floor);
    // The consumers not heard of for longest go first.
    const [oldest] = floors.keys();
    if (floors.size > MOST_CONSUMERS && oldest !== undefined) floors.delete(oldest);
    if (own.generation >= floor) return true;
    refuse(
      key,
      offer,
      new KvError("KV_GENERATION_STALE", `generation ${own.generation} of its blocks is over`),
    );
    return false;
  }

  function offered(key: string, offer: Offer, from: string): void {
    const match = matching.find(offer, incarnation);
    if (match.kind === "produced") deliver(key, offer, match.produced);
    else if (match.kind === "gone") refuse(key, offer, new KvError("KV_GENERATION_STALE", match.why));
    else if (matching.offers >= MOST_OFFERS) {
      log.error("push-offers-full", { from, offers: matching.offers });
      refuse(key, offer, new KvError("KV_REQUEST_INVALID", `more than ${MOST_OFFERS} registrations wait`));
    } else {
      matching.wait(key, offer);
      armSweep();
    }
  }

  /** Offers that nothing comes for do not wait for ever. */
  function armSweep(): void {
    const oldest = matching.oldestOffer();
    if (oldest === undefined || closed) {
      sweepTimer?.cancel();
      sweepTimer = undefined;
      return;
    }
    sweepTimer ??= clock.setTimer(
      sweep,
      Math.max(1, Math.ceil(oldest.sinceMs + options.offerMs - clock.now())),
    );
  }

  function sweep(): void {
    sweepTimer = undefined;
    for (let oldest = matching.oldestOffer(); oldest !== undefined; oldest = matching.oldestOffer()) {
      if (clock.now() < oldest.sinceMs + options.offerMs) break;
      matching.takeOffer(oldest.key);
      const message = "the prompt did not come to the prefill worker in time";
      refuse(oldest.key, oldest.offer, new KvError("KV_REQUEST_TIMEOUT", message));
    }
    armSweep();
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
    for (const [key, offer] of matching.takeOffersFor(produced)) deliver(key, offer, produced);
  }

  return {
    step(step) {
      incarnation = step.incarnation;
      for (const order of step.inBatch) matching.admit(order);
      for (const requestId of step.notSent) {
        const produced = matching.byRequestId(requestId);
        if (produced !== undefined) matching.end(produced);
        for (const [key, offer] of matching.takeOffersNaming(requestId)) {
          const message = `request ${requestId} ended at the prefill worker before its prompt was computed`;
          refuse(key, offer, new KvError("KV_REQUEST_ABORTED", message));
        }
      }
      for (const order of step.leases) finished(order, step.schedulerClockMs);
      armSweep();
    },
    offer(offer, from) {
      const key = keyOf(offer);
      // Both ranks of a vLLM consumer send the same; and what arrives twice is one thing.
      if (closed || writes.has(key) || over.has(key) || matching.waiting(key) !== undefined) return;
      if (isTimely(key, offer)) offered(key, offer, from);
    },
    withdraw(offer, from) {
      if (closed) return;
      const key = keyOf(offer);
      const write = writes.get(key);
      const error = new KvError("KV_REQUEST_ABORTED", `request ${offer.wireId} was withdrawn`);
      if (write !== undefined) {
        // It answers when the last transfer has let go.
        write.withdrawn = true;
        write.controller.abort(error);
        return;
      }
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
    }),
    async close() {
      closed = true;
      leases.close();
      armSweep();
      for (const { controller } of writes.values()) {
        controller.abort(new KvError("KV_AGENT_CLOSED", "the worker was closed"));
      }
      let late = false;
      let graceTimer: Timer | undefined;
      const grace = new Promise<void>((resolve) => {
        graceTimer = clock.setTimer(() => {
          late = true;
          resolve();
        }, CLOSE_GRACE_MS);
      });
      while (!late && queues.size > 0) await Promise.race([queues.idle(), grace]);
      graceTimer?.cancel();
      if (late) log.warn("close-did-not-wait", { writes: queues.size });
      matching.clear();
      deliveries.clear();
    },
  };

  function* wireIdsNamed(name: string): Iterable<string> {
    for (const { wireId } of matching.named(name)) yield wireId;
  }
}

function addressOf({ engineId, host, port, tpSize }: Offer): PeerAddress {
  return { engineId, host, port, tpSize, dcpSize: 1, ppSize: 1 };
}

/** The consumer request that an offer is part of. */
function consumerOf({ engineId, wireId, own }: Offer): string {
  return JSON.stringify([engineId, wireId, own?.incarnation, own?.generation]);
}

/** The offer of one rank; a vLLM consumer's ranks all speak for the whole. */
function keyOf(offer: Offer): string {
  return `${consumerOf(offer)} ${offer.own?.rank ?? "all"}`;
}

function processOf(engineId: string, incarnation: string): string {
  return JSON.stringify([engineId, incarnation]);
}

function timedOut({ wireId, engineId }: Offer, timeoutMs: number): KvError {
  return new KvError(
    "KV_TRANSFER_TIMEOUT",
    `the KV of request ${wireId} was not written to engine ${engineId} within ${timeoutMs} ms`,
    { details: { engineId, timeoutMs } },
  );
}
