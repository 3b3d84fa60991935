import {
  addressOf,
  createKeepAlive,
  type FreshLinkOptions,
  freshLink,
  type HeartbeatOrder,
  isMeant,
  type Messages,
  type Outbox,
  type RemoteLink,
  type TransferMetrics,
} from "@kv/connector";
import { type Clock, KvError, type Log, type Timer } from "@kv/interface";
import {
  type Ended,
  encodeRegistration,
  encodeWithdrawal,
  PUSH_CONTROL,
  type Registrant,
} from "./control.js";
import { pushBroken, type ReceivePushOptions, receivePush, type Words } from "./receive-push.js";
import type { RegistrationOrder } from "./step-metadata.js";

/**
 * The consumer's half of a worker: every registration waits on its own, for its peer's handshake and then for the word of each of the
 * producer's ranks; each ends in the outbox, at its deadline at the latest.
 */
export interface DecodeWorker {
  step(step: DecodeWorkerStep): void;
  /** A producer's rank has written its share of a request. */
  done(wireId: string, from: string): void;
  /** A producer's rank will not write, or no more. */
  ended(ended: Ended, from: string): void;
  outstanding(): { receives: number; tells: number; heartbeats: number };
  /** Takes everything back, and waits until no WRITE can come any more; not longer than 10 s. */
  close(): Promise<void>;
}

export interface DecodeWorkerStep {
  readonly incarnation: string;
  readonly registrations: readonly RegistrationOrder[];
  readonly withdrawals: readonly string[];
  readonly heartbeats: readonly HeartbeatOrder[] | null;
}

export interface DecodeWorkerOptions extends FreshLinkOptions, Pick<ReceivePushOptions, "settle"> {
  readonly clock: Clock;
  readonly log: Log;
  readonly metrics: TransferMetrics;
  readonly outbox: Outbox;
  readonly messages: Messages;
  readonly engineId: string;
  readonly tpSize: number;
  readonly tpRank: number;
  readonly heartbeatIntervalMs: number;
  readonly registrationTimeoutMs: number;
  readonly blocksAtRiskMs: number;
  readonly handshakeTimeoutMs: number;
  /** Several KV cache groups: block ids of one group do not say what is invalid, requests do. */
  readonly singleGroup: boolean;
}

const CLOSE_GRACE_MS = 10_000;
const REPEAT_MS = 1000;
const GRACE_MS = 500;
/** Words about requests that no step has told of yet: another rank's registration may bring them. */
const MOST_EARLY = 4096;
const EARLY_MS = 10_000;

interface Receiving {
  readonly order: RegistrationOrder;
  readonly controller: AbortController;
  readonly timer: Timer;
  readonly words: Listening;
  /** The engine gave it up: it wants the blocks back, and no verdict on them. */
  aborted: boolean;
  /** It was reported as failed, with its blocks at risk. */
  reported: boolean;
}

interface Listening extends Words {
  readonly done: Set<string>;
  readonly ended: Map<string, KvError>;
  heard(): void;
}

export function createDecodeWorker(options: DecodeWorkerOptions): DecodeWorker {
  const { clock, log, metrics, messages, outbox, peers } = options;
  const byRequestId = new Map<string, Receiving>();
  const byWireId = new Map<string, Receiving>();
  const early = new Map<string, { readonly agents: Set<string>; readonly sinceMs: number }>();
  /** Heartbeats in a row that a producer did not take. */
  const silent = new Map<string, number>();
  const runs = new Set<Promise<void>>();
  const tells = new Set<Promise<void>>();
  let incarnation = "";
  let closed = false;
  const keepAlive = createKeepAlive({
    clock,
    intervalMs: options.heartbeatIntervalMs,
    peers,
    messages,
    beaten: ({ engineId }, taken) => {
      if (taken) silent.delete(engineId);
      else track(tells, suspect(engineId));
    },
    track: (work) => track(tells, work),
  });

  /**
   * A producer that dies between a registration and its WRITE sends no word. A heartbeat that the transport does not take raises the
   * question; another process in its place answers it, and so does nobody, asked twice.
   */
  async function suspect(engineId: string): Promise<void> {
    const waiting = [...byRequestId.values()].filter(({ order }) => order.remote.engineId === engineId);
    const link = peers.peek(engineId);
    const first = waiting[0];
    if (first === undefined || link === undefined) return;
    const process = await receiveOptions.processAt(first.order);
    const times = (silent.get(engineId) ?? 0) + 1;
    silent.set(engineId, times);
    if (process === link.incarnation || (process === undefined && times < 2)) return;
    silent.delete(engineId);
    const reason = process === undefined ? "does not answer" : "was restarted";
    peers.drop(engineId, `it ${reason}`, link);
    for (const { controller, order } of waiting) {
      const message = `engine ${engineId} ${reason} before it wrote the KV of request ${order.requestId}`;
      controller.abort(new KvError("KV_PEER_DISCONNECTED", message));
    }
  }

  const us = (): Registrant => ({
    engineId: options.engineId,
    tpSize: options.tpSize,
    tpRank: options.tpRank,
    incarnation,
  });

  const receiveOptions: ReceivePushOptions = {
    clock,
    link: (order, signal) => freshLink(order.remote, signal, options),
    register(order, link, agent) {
      const own = link.features.has(PUSH_CONTROL);
      return messages.send(agent, encodeRegistration(order, us(), own), (error) => {
        metrics.notificationFailed();
        log.warn("push_reg_notif_failed", { requestId: order.requestId, agent, error: String(error) });
        peers.drop(order.remote.engineId, String(error), link);
      });
    },
    withdraw,
    async processAt({ remote }) {
      const controller = new AbortController();
      const timer = clock.setTimer(
        () => controller.abort(new KvError("KV_SIDE_CHANNEL_TIMEOUT", "nobody answered")),
        options.handshakeTimeoutMs,
      );
      try {
        return await options.currentIncarnation(remote, controller.signal);
      } catch {
        return undefined;
      } finally {
        timer.cancel();
      }
    },
    settle: options.settle,
    repeatMs: REPEAT_MS,
    graceMs: GRACE_MS,
    blocksAtRiskMs: options.blocksAtRiskMs,
    tpSize: options.tpSize,
  };

  function withdraw(order: RegistrationOrder, link: RemoteLink, agents: Iterable<string>): void {
    if (!link.features.has(PUSH_CONTROL)) return;
    const payload = encodeWithdrawal(order, us());
    for (const agent of agents) {
      void messages.send(agent, payload, (error) =>
        log.debug("push-withdrawal-failed", { requestId: order.requestId, agent, error: String(error) }),
      );
    }
  }

  function start(order: RegistrationOrder): void {
    const { requestId, wireId } = order;
    if (byRequestId.has(requestId)) {
      // Only a scheduler that lost count sends it.
      log.error("registration-ordered-twice", { requestId });
      return;
    }
    const controller = new AbortController();
    const timeoutMs = options.registrationTimeoutMs;
    const timeout = () =>
      controller.abort(
        new KvError(
          "KV_REQUEST_TIMEOUT",
          `the KV of request ${requestId} was not written by engine ${order.remote.engineId} within ${timeoutMs} ms`,
          { details: { engineId: order.remote.engineId, timeoutMs } },
        ),
      );
    const timer = clock.setTimer(timeout, timeoutMs, { ref: true });
    const before = early.get(wireId);
    early.delete(wireId);
    // Older than that it was about another use of the id.
    const fresh = before !== undefined && clock.now() - before.sinceMs < EARLY_MS;
    const words = listening(fresh ? before.agents : []);
    const entry: Receiving = { order, controller, timer, words, aborted: false, reported: false };
    byRequestId.set(requestId, entry);
    byWireId.set(wireId, entry);
    const { signal } = controller;
    const over = () => {
      timer.cancel();
      byRequestId.delete(requestId);
      byWireId.delete(wireId);
    };
    const fail = (thrown: unknown, blocksAtRisk: boolean) => {
      const { error, failureType } = pushBroken(thrown, "KV_INTERNAL", "transfer_exception", signal);
      log.warn("receive-failed", {
        requestId,
        engineId: order.remote.engineId,
        failureType,
        code: error.code,
        error: error.message,
        blocksAtRisk,
      });
      entry.reported = blocksAtRisk;
      const invalid = options.singleGroup ? (order.localBlockIds[0] ?? []) : [];
      outbox.receiveFailed(requestId, { error, failureType, blocksAtRisk }, invalid);
    };
    const run = receivePush(order, signal, words, receiveOptions, (broken) => {
      if (!entry.aborted) fail(broken, true);
    }).then(
      () => {
        over();
        outbox.received(requestId);
      },
      (thrown: unknown) => {
        over();
        const { failureType } = pushBroken(thrown, "KV_INTERNAL", "transfer_exception", signal);
        // Given up before there was anyone to tell: the producer may free what it has.
        if (failureType === "push_reg_handshake_failed" || failureType === "transfer_setup_failed")
          tell(order);
        if (entry.reported) outbox.secured(requestId);
        else if (entry.aborted) outbox.received(requestId);
        else fail(thrown, false);
      },
    );
    track(runs, run);
  }

  /** Nothing is wanted: the producer may free the blocks. A vLLM one has no word for it, and lets its lease run out. */
  function tell(order: RegistrationOrder): void {
    if (closed) return;
    const { remote } = order;
    track(
      tells,
      peers.acquire(addressOf(remote)).then(
        (hold) => {
          if (isMeant(hold.peer, remote)) withdraw(order, hold.peer, hold.peer.agents.values());
          hold.release();
        },
        (error: unknown) => {
          log.debug("push-withdrawal-failed", { requestId: order.requestId, error: String(error) });
        },
      ),
    );
  }

  return {
    step(step) {
      incarnation = step.incarnation;
      for (const order of step.registrations) {
        if (order.awaited) start(order);
        else tell(order);
      }
      for (const requestId of step.withdrawals) {
        const entry = byRequestId.get(requestId);
        if (entry === undefined) continue;
        entry.aborted = true;
        entry.controller.abort(new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted`));
      }
      if (step.heartbeats !== null) keepAlive.replace(step.heartbeats);
    },
    done(wireId, from) {
      const entry = byWireId.get(wireId);
      if (entry !== undefined) {
        entry.words.done.add(from);
        entry.words.heard();
        return;
      }
      metrics.notificationAfterExpiry();
      log.debug("notification-for-unknown-request", { requestId: wireId, from });
      const known = early.get(wireId) ?? { agents: new Set<string>(), sinceMs: clock.now() };
      known.agents.add(from);
      early.set(wireId, known);
      if (early.size <= MOST_EARLY) return;
      for (const oldest of early.keys()) {
        early.delete(oldest);
        break;
      }
    },
    ended({ wireId, incarnation: process, generation, code, message }, from) {
      const entry = byWireId.get(wireId);
      if (entry === undefined || process !== incarnation || entry.order.generation !== generation) return;
      entry.words.ended.set(
        from,
        new KvError(
          code,
          `engine ${entry.order.remote.engineId} does not write request ${wireId}: ${message}`,
        ),
      );
      entry.words.heard();
    },
    outstanding: () => ({
      receives: byRequestId.size,
      tells: tells.size + messages.pending,
      heartbeats: keepAlive.size,
    }),
    async close() {
      closed = true;
      keepAlive.close();
      for (const entry of byRequestId.values()) {
        entry.aborted = true;
        entry.controller.abort(new KvError("KV_AGENT_CLOSED", "the worker was closed"));
      }
      let late = false;
      let graceTimer: Timer | undefined;
      const grace = new Promise<void>((resolve) => {
        graceTimer = clock.setTimer(() => {
          late = true;
          resolve();
        }, CLOSE_GRACE_MS);
      });
      while (!late && runs.size + tells.size + messages.pending > 0) {
        await Promise.race([Promise.all([...runs, ...tells, messages.drained()]), grace]);
      }
      graceTimer?.cancel();
      if (late) log.warn("close-did-not-wait", { receives: runs.size, tells: tells.size + messages.pending });
    },
  };
}

function listening(before: Iterable<string>): Listening {
  let resolve: () => void = () => {};
  let next: Promise<void>;
  const arm = () => {
    next = new Promise((done) => {
      resolve = done;
    });
  };
  arm();
  return {
    done: new Set(before),
    ended: new Map(),
    next: () => next,
    heard() {
      resolve();
      arm();
    },
  };
}

/** `promise` never rejects. */
function track(all: Set<Promise<void>>, promise: Promise<void>): void {
  const tracked = promise.finally(() => all.delete(tracked));
  all.add(tracked);
}
