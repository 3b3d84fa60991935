import type { Agent, Log } from "@kv/interface";
import {
  decodeNotification,
  encodeNotification,
  encodeRequestControl,
  isWireSafeRequestId,
  type KvNotification,
  REQUEST_CONTROL,
} from "@kv/protocol";
import type { HeartbeatRequest } from "../scheduler/step-types.js";
import type { RemoteEngine } from "./remote-engine.js";

/** Ids per heartbeat, far below any transport's limit for one notification. */
const HEARTBEAT_IDS = 256;

/** The outcome of sending a heartbeat. */
export interface HeartbeatResult {
  /** Requests whose heartbeat the transport accepted for every agent of the engine. */
  readonly takenIds: readonly string[];
  /** Whether the transport accepted everything that was sent. False suggests that the engine is gone. */
  readonly isDelivered: boolean;
}

/**
 * Sends a worker's notifications in the background. Methods do not throw. After a lost notification, the peer waits for a lease or a deadline to end.
 */
export class NotificationSender {
  readonly #agent: Agent;
  readonly #log: Log;
  readonly #pending = new Set<Promise<boolean>>();

  constructor({ agent, log }: { readonly agent: Agent; readonly log: Log }) {
    this.#agent = agent;
    this.#log = log;
  }

  /** Sends to an agent. Resolves with true when the transport accepted the notification, and with false after a call of `failed`. */
  send(agentName: string, payload: Uint8Array, failed: (error: unknown) => void): Promise<boolean> {
    const sent = this.#notify(agentName, payload)
      .then(
        () => true,
        (error: unknown) => {
          failed(error);
          return false;
        },
      )
      .finally(() => this.#pending.delete(sent));
    this.#pending.add(sent);
    return sent;
  }

  /**
   * Sends a heartbeat for requests to all of an engine's agents: with capabilities to an `@kv` engine, in vLLM's form otherwise. Ids that a
   * peer would misparse (see `isWireSafeRequestId`) are left out of vLLM's form: P does not extend their leases.
   */
  async sendHeartbeat(
    engine: Pick<RemoteEngine, "agents" | "features">,
    named: readonly HeartbeatRequest[],
  ): Promise<HeartbeatResult> {
    const proven = engine.features.has(REQUEST_CONTROL)
      ? named.flatMap(({ requestId, capability }) =>
          capability === undefined ? [] : [{ requestId, capability }],
        )
      : [];
    const provenIds = new Set(proven.map(({ requestId }) => requestId));
    const plainIds = new Set(named.map(({ requestId }) => requestId));
    const plain = [...plainIds].filter((id) => !provenIds.has(id) && isWireSafeRequestId(id));
    const agents = [...new Set(engine.agents.values())];
    const messages = [
      ...inChunks(plain).map((requestIds) => ({
        requestIds,
        payload: encodeNotification({ kind: "heartbeat", requestIds }),
      })),
      ...inChunks(proven).map((requests) => ({
        requestIds: requests.map(({ requestId }) => requestId),
        payload: encodeRequestControl({ kind: "heartbeat", requests }),
      })),
    ];
    let isDelivered = true;
    const taken = await Promise.all(
      messages.map(async ({ requestIds, payload }) => {
        const sent = agents.map((name) =>
          this.send(name, payload, (error) =>
            this.#log.debug("heartbeat-failed", { agent: name, error: String(error) }),
          ),
        );
        const isTaken = (await Promise.all(sent)).every(Boolean);
        isDelivered &&= isTaken;
        return isTaken ? requestIds : [];
      }),
    );
    return { takenIds: taken.flat(), isDelivered };
  }

  /** Resolves when the transport has accepted or failed every notification so far. */
  async idle(): Promise<void> {
    while (this.#pending.size > 0) await Promise.all(this.#pending);
  }

  /** Number of notifications that the transport has not accepted yet. */
  get size(): number {
    return this.#pending.size;
  }

  /** Async, so that an exception of the transport becomes a rejection. */
  async #notify(agentName: string, payload: Uint8Array): Promise<void> {
    await this.#agent.notify(agentName, payload);
  }
}

function inChunks<T>(list: readonly T[]): (readonly T[])[] {
  const chunks: (readonly T[])[] = [];
  for (let i = 0; i < list.length; i += HEARTBEAT_IDS) chunks.push(list.slice(i, i + HEARTBEAT_IDS));
  return chunks;
}

/**
 * Calls `handle` for each notification until the agent closes. A notification that cannot be decoded, or that `handle` refuses by throwing,
 * is logged; nothing that a peer sends ends the loop.
 */
export function receiveNotifications(
  agent: Agent,
  log: Log,
  handle: (notification: KvNotification, from: string) => void,
): void {
  async function loop(): Promise<void> {
    for await (const { from, payload } of agent.notifications()) {
      try {
        handle(decodeNotification(payload), from);
      } catch (error) {
        log.warn("notification-refused", { from, error: String(error) });
      }
    }
  }
  loop().catch((error: unknown) => log.error("notifications-ended", { error: String(error) }));
}
