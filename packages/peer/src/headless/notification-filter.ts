import { delegateTo } from "@kv/connector/building-blocks";
import type { Agent, Transport } from "@kv/interface";
import { decodeDone } from "@kv/protocol";

export interface NotificationFilter {
  readonly transport: Transport;
  drop(remoteRequestId: string): void;
}

/** Hides some READs from P, as if D had died. */
export function filterNotifications(transport: Transport): NotificationFilter {
  const dropped = new Set<string>();

  function isDropped(payload: Uint8Array | undefined): boolean {
    if (payload === undefined || dropped.size === 0) return false;
    const done = decodeDone(payload);
    return done !== undefined && dropped.has(done.requestId);
  }

  function filtered(agent: Agent): Agent {
    return delegateTo(agent, {
      transfer(request) {
        if (!isDropped(request.notification)) return agent.transfer(request);
        const { notification: _, ...rest } = request;
        return agent.transfer(rest);
      },
      notify: (remote, payload) =>
        isDropped(payload) ? Promise.resolve() : agent.notify(remote, payload),
    });
  }

  return {
    drop: (remoteRequestId) => void dropped.add(remoteRequestId),
    transport: delegateTo(transport, {
      createAgent: async (options) => filtered(await transport.createAgent(options)),
    }),
  };
}
