import type { Agent, DescriptorTable, PreparedList } from "@kv/interface";

/**
 * Prepared lists of local memory, shared by all remote engines whose plans divide the memory in the same way. A list is closed with its last
 * user.
 */
export class SharedLocalLists {
  readonly #agent: Agent;
  readonly #lists = new Map<string, { users: number; readonly list: Promise<PreparedList> }>();

  constructor(agent: Agent) {
    this.#agent = agent;
  }

  /** The list for a key, prepared from `table` at the first call. Errors: those of `Agent.prepareLocal`. */
  async acquire(key: string, table: () => DescriptorTable): Promise<PreparedList> {
    let entry = this.#lists.get(key);
    if (entry === undefined) {
      entry = { users: 0, list: this.#agent.prepareLocal(table()) };
      this.#lists.set(key, entry);
    }
    entry.users += 1;
    try {
      return await entry.list;
    } catch (error) {
      entry.users -= 1;
      if (this.#lists.get(key) === entry) this.#lists.delete(key);
      throw error;
    }
  }

  /** Ends one use of a list. Errors: those of `PreparedList.close`. */
  async release(key: string): Promise<void> {
    const entry = this.#lists.get(key);
    if (entry === undefined) return;
    entry.users -= 1;
    if (entry.users > 0) return;
    this.#lists.delete(key);
    await (await entry.list).close();
  }

  /** Number of lists in use. */
  get size(): number {
    return this.#lists.size;
  }
}

/**
 * Remote agents with a count of users: an engine that is being closed and its replacement may use the same agent, which
 * must stay added until its last user is gone.
 */
export class SharedRemoteAgents {
  readonly #agent: Agent;
  readonly #users = new Map<string, number>();

  constructor(agent: Agent) {
    this.#agent = agent;
  }

  /** Adds a remote agent and returns its name. Errors: those of `Agent.addRemote`. */
  async add(metadata: Uint8Array): Promise<string> {
    const name = await this.#agent.addRemote(metadata);
    this.#users.set(name, (this.#users.get(name) ?? 0) + 1);
    return name;
  }

  /** Ends one use of a remote agent. Errors: those of `Agent.removeRemote`. */
  async remove(name: string): Promise<void> {
    const left = (this.#users.get(name) ?? 1) - 1;
    if (left > 0) {
      this.#users.set(name, left);
      return;
    }
    this.#users.delete(name);
    await this.#agent.removeRemote(name);
  }

  /** Number of agents in use. */
  get size(): number {
    return this.#users.size;
  }
}
