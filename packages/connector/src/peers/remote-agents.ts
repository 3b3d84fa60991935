import type { Agent } from "@kv/interface";

/**
 * Remote agents by name, counted: a link that is closed and the one that follows it may name the same agent, which must stay
 * known until the last of them is gone.
 */
export interface RemoteAgents {
  /** Makes the agent known, or known again, and answers its name. */
  add(metadata: Uint8Array): Promise<string>;
  remove(name: string): Promise<void>;
  readonly size: number;
}

export function createRemoteAgents(agent: Agent): RemoteAgents {
  const users = new Map<string, number>();
  return {
    async add(metadata) {
      const name = await agent.addRemote(metadata);
      users.set(name, (users.get(name) ?? 0) + 1);
      return name;
    },
    async remove(name) {
      const left = (users.get(name) ?? 1) - 1;
      if (left > 0) {
        users.set(name, left);
        return;
      }
      users.delete(name);
      await agent.removeRemote(name);
    },
    get size() {
      return users.size;
    },
  };
}
