import type { Agent, Log } from "@kv/interface";
import {
  decodeNotification,
  encodeNotification,
  isWireSafeRequestId,
  type KvNotification,
} from "@kv/protocol";
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
   * Sends a heartbeat for requests to all of an engine's agents. Ids that a peer would misparse (see `isWireSafeRequestId`) are left out: P does not
   * extend their leases.
   */
  async sendHeartbeat(
    engine: Pick<RemoteEngine, "agents">,
    remoteRequestIds: readonly string[],
  ): Promise<HeartbeatResult> {
    const safe = remoteRequestIds.filter(isWireSafeRequestId);
    const agents = [...new Set(engine.agents.values())];
    const chunks: (readonly string[])[] = [];
    for (let i = 0; i < safe.length; i += HEARTBEAT_IDS) chunks.push(safe.slice(i, i + HEARTBEAT_IDS));
    const taken = await Promise.all(
      chunks.map(async (requestIds) => {
        const payload = encodeNotification({ kind: "heartbeat", requestIds });
        const sent = agents.map((name) =>
          this.send(name, payload, (error) =>
            this.#log.debug("heartbeat-failed", { agent: name, error: String(error) }),
          ),
        );
        return (await Promise.all(sent)).every(Boolean) ? requestIds : [];
      }),
    );
    const takenIds = taken.flat();
    return { takenIds, isDelivered: takenIds.length === safe.length };
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
