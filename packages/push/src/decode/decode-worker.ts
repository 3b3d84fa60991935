import {
  type AwaitedRequest,
  createAwaitedRequests,
  createBackground,
  createKeepAlive,
  type FreshLinkOptions,
  freshLink,
  type HeartbeatOrder,
  idleWithin,
  type Messages,
  type Outbox,
  type RemoteLink,
  type TransferMetrics,
  tellPeer,
} from "@kv/connector";
import { type Clock, type KvCacheConfig, KvError, type Log } from "@kv/interface";
import {
  type Ended,
  encodeRegistration,
  encodeWithdrawal,
  PUSH_CONTROL,
  type Registrant,
} from "../control.js";
import { type ReceivePushOptions, receivePush } from "./receive-push.js";
import type { RegistrationOrder } from "../step-metadata.js";
import { createSuspicion } from "./producer-liveness.js";
import { createWordTable } from "./push-replies.js";

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
  /**
   * Takes everything back, and waits until no WRITE can come any more; not longer than `CLOSE_GRACE_MS`. Requests that still wait then
   * are let go of and reported to nobody: their blocks may be written to until the agent is closed.
   */
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
  readonly groups: KvCacheConfig["groups"];
}

const REPEAT_MS = 1000;
const GRACE_MS = 500;

type Entry = AwaitedRequest<RegistrationOrder>;

export function createDecodeWorker(options: DecodeWorkerOptions): DecodeWorker {
  const { clock, log, metrics, messages, outbox, peers } = options;
  const runs = createBackground();
  const tells = createBackground();
  const words = createWordTable({ clock });
  const byWireId = new Map<string, RegistrationOrder>();
  let incarnation = "";
  let closed = false;
  /** The grace of `close` is over. */
  let abandoned = false;
  /** Questions under way. */
  const asking = new Set<AbortController>();
  const awaited = createAwaitedRequests<RegistrationOrder>({
    clock,
    log,
    outbox,
    background: runs,
    timeoutMs: options.registrationTimeoutMs,
    // Of several KV cache groups, block ids of one do not say what is invalid: requests do.
    singleGroup: options.groups.length === 1,
  });
  const suspicion = createSuspicion({ peers, waiting: awaited.values, processAt });
  const keepAlive = createKeepAlive({
    clock,
    intervalMs: options.heartbeatIntervalMs,
    peers,
    messages,
    beaten({ engineId }, taken) {
      if (taken) suspicion.alive(engineId);
      else tells.track(suspicion.ask(engineId));
    },
    track: tells.track,
  });

  const us = (): Registrant => ({
    engineId: options.engineId,
    tpSize: options.tpSize,
    tpRank: options.tpRank,
    incarnation,
  });

  async function processAt({ remote }: RegistrationOrder): Promise<string | undefined> {
    const controller = new AbortController();
    asking.add(controller);
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
      asking.delete(controller);
    }
  }

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
    processAt,
    abandoned: () => abandoned,
    settle: options.settle,
    repeatMs: REPEAT_MS,
    graceMs: GRACE_MS,
    blocksAtRiskMs: options.blocksAtRiskMs,
    tpSize: options.tpSize,
    groups: options.groups,
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

  const fetching = {
    run(entry: Entry) {
      const { order, signal, blocksAtRisk } = entry;
      byWireId.set(order.wireId, order);
      return receivePush(order, signal, words.open(order.wireId), receiveOptions, blocksAtRisk);
    },
    ended({ order }: Entry, broken: { failureType: string } | undefined) {
      byWireId.delete(order.wireId);
      words.close(order.wireId);
      // Given up before there was anyone to tell: the producer may free what it has.
      const untold = ["push_reg_handshake_failed", "transfer_setup_failed"];
      if (broken !== undefined && untold.includes(broken.failureType)) tell(order);
    },
  };

  /** Nothing is wanted: the producer may free the blocks. A vLLM one has no word for it, and lets its lease run out. */
  function tell(order: RegistrationOrder): void {
    if (closed) return;
    tellPeer(order.remote, (link) => withdraw(order, link, link.agents.values()), {
      peers,
      background: tells,
      failed: (error) =>
        log.debug("push-withdrawal-failed", { requestId: order.requestId, error: String(error) }),
    });
  }

  return {
    step(step) {
      incarnation = step.incarnation;
      for (const order of step.registrations) {
        if (order.awaited) awaited.start(order, fetching);
        else tell(order);
      }
      for (const requestId of step.withdrawals) {
        awaited.abort(requestId, new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted`));
      }
      if (step.heartbeats !== null) keepAlive.replace(step.heartbeats);
    },
    done(wireId, from) {
      if (words.done(wireId, from)) return;
      metrics.notificationAfterExpiry();
      log.debug("notification-for-unknown-request", { requestId: wireId, from });
    },
    ended({ wireId, incarnation: process, generation, code, message }, from) {
      const order = byWireId.get(wireId);
      if (order === undefined || process !== incarnation || order.generation !== generation) return;
      const said = `engine ${order.remote.engineId} does not write request ${wireId}: ${message}`;
      words.ended(wireId, from, new KvError(code, said));
    },
    outstanding: () => ({
      receives: awaited.size,
      tells: tells.size + messages.size,
      heartbeats: keepAlive.size,
    }),
    async close() {
      closed = true;
      keepAlive.close();
      awaited.abortAll(new KvError("KV_AGENT_CLOSED", "the worker was closed"));
      if (await idleWithin(clock, [runs, tells, messages])) return;
      log.warn("close-did-not-wait", { receives: runs.size, tells: tells.size + messages.size });
      abandoned = true;
      awaited.abandonAll();
      for (const question of asking) question.abort(new KvError("KV_AGENT_CLOSED", "the worker was closed"));
      words.wakeAll();
    },
  };
}
