import { delegateTo } from "@kv/connector/building-blocks";
import type { Agent, Memory, Notification, Transport } from "@kv/interface";

/** A transport that records the notifications that arrive and the memory that is allocated. */
export interface TappedTransport {
  readonly transport: Transport;
  /** The payloads as text, in the order in which the agents returned them. */
  readonly notifications: readonly string[];
  /** In the order of allocation. */
  readonly memories: readonly Memory[];
  /** Resolves with the first matching notification, also when it arrived before the call. */
  notification(passes: (text: string) => boolean): Promise<string>;
}

export function tapTransport(transport: Transport): TappedTransport {
  const notifications: string[] = [];
  const memories: Memory[] = [];
  const waiting = new Set<() => void>();

  async function* heard(
    from: AsyncIterableIterator<Notification>,
  ): AsyncIterableIterator<Notification> {
    for await (const notification of from) {
      notifications.push(new TextDecoder().decode(notification.payload));
      yield notification;
      for (const look of waiting) look();
    }
  }

  function tapped(agent: Agent): Agent {
    return delegateTo(agent, { notifications: () => heard(agent.notifications()) });
  }

  return {
    transport: {
      name: transport.name,
      capabilities: transport.capabilities,
      createAgent: async (options) => tapped(await transport.createAgent(options)),
      allocate(lengthBytes, options) {
        const memory = transport.allocate(lengthBytes, options);
        memories.push(memory);
        return memory;
      },
      close: () => transport.close(),
    },
    notifications,
    memories,
    notification(passes) {
      return new Promise((resolve) => {
        const look = () => {
          const found = notifications.find(passes);
          if (found === undefined) return;
          waiting.delete(look);
          resolve(found);
        };
        waiting.add(look);
        look();
      });
    },
  };
}
