import {
  engineKey,
  type OpenEngine,
  type PendingReceives,
  type RemoteEngines,
} from "@kv/connector/building-blocks";
import { type Clock, KvError } from "@kv/interface";
import type { LeaseReply } from "@kv/protocol";
import type { RegistrationOrder } from "./step-metadata.js";

type EngineAddress = OpenEngine["address"];

export interface ProducerLivenessOptions {
  readonly clock: Clock;
  readonly engines: Pick<RemoteEngines, "peek" | "drop" | "queryLease">;
  readonly receives: Pick<PendingReceives<RegistrationOrder>, "values">;
  readonly probeTimeoutMs: number;
}

/**
 * Detects P's that die between a registration and its WRITE. After a failed heartbeat P is probed:
 * a new incarnation or two missed probes in a row mean death. vLLM's listener would stop at a
 * probe, so its P is dead after two failed heartbeats in a row.
 */
export class ProducerLiveness {
  readonly #options: ProducerLivenessOptions;
  /** Failed heartbeats in a row without an answered probe, by engine. */
  readonly #missed = new Map<string, number>();
  readonly #probes = new Set<AbortController>();

  constructor(options: ProducerLivenessOptions) {
    this.#options = options;
  }

  heartbeatDelivered(engine: EngineAddress): void {
    this.#missed.delete(engineKey(engine));
  }

  /** Fails the requests of an engine that is gone. Never rejects. */
  async heartbeatFailed(address: EngineAddress): Promise<void> {
    const { engines, receives } = this.#options;
    const { engineId } = address;
    const key = engineKey(address);
    const engine = engines.peek(address);
    // A request that still opens the engine shakes hands with whatever answers.
    const waiting = [...receives.values()].filter((receive) => receive.engine === engine);
    const first = waiting[0];
    if (first === undefined || engine === undefined) return;
    const canBeProbed = engine.incarnation !== undefined;
    const reply = canBeProbed ? await this.probe(first.order) : undefined;
    const missed = (this.#missed.get(key) ?? 0) + 1;
    this.#missed.set(key, missed);
    if (reply === undefined ? missed < 2 : isSameAgent(engine, reply)) return;
    this.#missed.delete(key);
    const silent = canBeProbed ? "stopped answering" : "stopped receiving heartbeats";
    const isAwake = reply?.incarnation === engine.incarnation;
    const answered = isAwake ? "registered its KV caches again" : "was restarted";
    const reason = reply === undefined ? silent : answered;
    engines.drop(engine, `it ${reason}`);
    for (const receive of waiting) {
      const message = `engine ${engineId} ${reason} before it wrote the KV of request ${receive.order.requestId}`;
      receive.fail(new KvError("KV_PEER_DISCONNECTED", message));
    }
  }

  /** Undefined if no process answers in time. Never rejects. */
  async probe({ remote }: RegistrationOrder): Promise<LeaseReply | undefined> {
    const { clock, probeTimeoutMs, engines } = this.#options;
    const controller = new AbortController();
    this.#probes.add(controller);
    const timer = clock.setTimer(
      () => controller.abort(new KvError("KV_SIDE_CHANNEL_TIMEOUT", "no answer in time")),
      probeTimeoutMs,
    );
    try {
      return await engines.queryLease(remote, controller.signal);
    } catch {
      return undefined;
    } finally {
      timer.cancel();
      this.#probes.delete(controller);
    }
  }

  close(): void {
    const reason = new KvError("KV_AGENT_CLOSED", "the worker was closed");
    for (const probe of this.#probes) probe.abort(reason);
  }
}

export function isSameAgent(
  {
    incarnation,
    registrationGeneration = 0,
  }: Pick<OpenEngine, "incarnation" | "registrationGeneration">,
  reply: LeaseReply,
): boolean {
  return (
    incarnation === reply.incarnation &&
    (reply.registrationGeneration ?? 0) <= registrationGeneration
  );
}
