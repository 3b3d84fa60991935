import type { Agent, Transport } from "@kv/interface";

/**
 * A transport whose agents keep some notifications to themselves: what a decode worker that dies after its reads looks like from the other
 * side. Heartbeats and all else pass.
 */
export function silentTransport(transport: Transport, isKept: (text: string) => boolean): Transport {
  const kept = (payload: Uint8Array | undefined) =>
    payload !== undefined && isKept(new TextDecoder().decode(payload));

  /** Delegates by name, as an agent's own methods may need their receiver. */
  function silent(agent: Agent): Agent {
    return {
      name: agent.name,
      get backends() {
        return agent.backends;
      },
      register: (memory) => agent.register(memory),
      localMetadata: () => agent.localMetadata(),
      addRemote: (metadata) => agent.addRemote(metadata),
      removeRemote: (name) => agent.removeRemote(name),
      prepareLocal: (table) => agent.prepareLocal(table),
      prepareRemote: (remote, table) => agent.prepareRemote(remote, table),
      transfer(request) {
        if (!kept(request.notification)) return agent.transfer(request);
        const { notification: _, ...rest } = request;
        return agent.transfer(rest);
      },
      notify: (remote, payload) => (kept(payload) ? Promise.resolve() : agent.notify(remote, payload)),
      notifications: () => agent.notifications(),
      telemetry: () => agent.telemetry(),
      close: (options) => agent.close(options),
    };
  }

  return {
    name: transport.name,
    capabilities: transport.capabilities,
    createAgent: async (options) => silent(await transport.createAgent(options)),
    allocate: (lengthBytes, options) => transport.allocate(lengthBytes, options),
    close: () => transport.close(),
  };
}
