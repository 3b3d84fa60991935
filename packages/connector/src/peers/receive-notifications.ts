import type { Agent, Log } from "@kv/interface";
import { decodeNotification, type KvNotification } from "@kv/protocol";

/** What peers say, until the agent closes. A bad notification is logged; nothing that a peer sends ends this. */
export function hearNotifications(
  agent: Agent,
  log: Log,
  heard: (notification: KvNotification, from: string) => void,
): void {
  async function listen(): Promise<void> {
    for await (const { from, payload } of agent.notifications()) {
      try {
        heard(decodeNotification(payload), from);
      } catch (error) {
        log.warn("notification-refused", { from, error: String(error) });
      }
    }
  }
  listen().catch((error: unknown) => log.error("notifications-ended", { error: String(error) }));
}
