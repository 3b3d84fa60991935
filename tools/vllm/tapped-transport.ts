import { delegateTo } from "@kv/connector/building-blocks";
import type { Memory, Notification, Transport } from "@kv/interface";

/** The notifications that arrive, as text, and the memory it allocates. */
export function tapTransport(transport: Transport) {
  const notifications: string[] = [];
  const memories: Memory[] = [];

  async function* heard(
    from: AsyncIterableIterator<Notification>,
  ): AsyncIterableIterator<Notification> {
    for await (const notification of from) {
      notifications.push(new TextDecoder().decode(notification.payload));
      yield notification;
    }
  }

  const tapped: Transport = {
    name: transport.name,
    capabilities: transport.capabilities,
    async createAgent(options) {
      const agent = await transport.createAgent(options);
      return delegateTo(agent, { notifications: () => heard(agent.notifications()) });
    },
    allocate(lengthBytes, options) {
      const memory = transport.allocate(lengthBytes, options);
      memories.push(memory);
      return memory;
    },
    close: () => transport.close(),
  };
  return { transport: tapped, notifications, memories };
}
