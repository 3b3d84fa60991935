import { type Agent, type DescriptorTable, KvError, type PreparedList } from "@kv/interface";

/**
 * Prepared lists of local memory, shared by all remote engines whose plans divide the memory in the
 * same way. A list is closed with its last user.
 */
export class SharedLocalLists {
  readonly #agent: Agent;
  readonly #lists = new Map<string, { users: number; readonly list: Promise<PreparedList> }>();

  constructor(agent: Agent) {
    this.#agent = agent;
  }

  /**
   * The list for a key, prepared from `table` at the first call.
   * @throws The errors of `Agent.prepareLocal`.
   */
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

  /**
   * Ends one use of a list.
   * @throws The errors of `PreparedList.close`.
   */
  async release(key: string): Promise<void> {
    const entry = this.#lists.get(key);
    if (entry === undefined) return;
    entry.users -= 1;
    if (entry.users > 0) return;
    this.#lists.delete(key);
    await (await entry.list).close();
  }

  get size(): number {
    return this.#lists.size;
  }
}

interface RemoteAgentEntry {
  /** The engine whose handshake added the agent, see `SharedRemoteAgents.add`. */
  readonly owner: string;
  metadata: Uint8Array;
  users: number;
}

/**
 * Remote agents with a count of users: an engine that is being closed and its replacement may use
 * the same agent, which must stay added until its last user is gone. A transport knows agents by
 * their names, and a name is only what a handshake says: an engine that names another engine's
 * agent is refused, so that it cannot get the other one's notifications.
 */
export class SharedRemoteAgents {
  readonly #agent: Agent;
  readonly #entries = new Map<string, RemoteAgentEntry>();
  /** One addition at a time: the name is known only when the transport has loaded the metadata. */
  #last: Promise<unknown> = Promise.resolve();

  constructor(agent: Agent) {
    this.#agent = agent;
  }

  /**
   * Adds a remote agent and returns its name. `owner` is the address at which the metadata came.
   * @throws `KV_AGENT_METADATA_INVALID` when an engine at another address uses an agent of that
   * name with other metadata; those of `Agent.addRemote`.
   */
  add(metadata: Uint8Array, owner: string): Promise<string> {
    const added = this.#last.then(() => this.#add(metadata, owner));
    this.#last = added.catch(() => {});
    return added;
  }

  /**
   * Ends one use of a remote agent.
   * @throws The errors of `Agent.removeRemote`.
   */
  async remove(name: string): Promise<void> {
    const entry = this.#entries.get(name);
    if (entry !== undefined) {
      entry.users -= 1;
      if (entry.users > 0) return;
    }
    this.#entries.delete(name);
    await this.#agent.removeRemote(name);
  }

  get size(): number {
    return this.#entries.size;
  }

  async #add(metadata: Uint8Array, owner: string): Promise<string> {
    const name = await this.#agent.addRemote(metadata);
    const entry = this.#entries.get(name);
    if (entry === undefined) {
      this.#entries.set(name, { owner, metadata, users: 1 });
      return name;
    }
    if (!sameBytes(entry.metadata, metadata)) {
      if (entry.owner !== owner) {
        // The transport may have bound the name to the newcomer.
        await this.#agent.addRemote(entry.metadata);
        throw new KvError(
          "KV_AGENT_METADATA_INVALID",
          `the engine at ${owner} names the agent ${name}, which is the agent of the engine at ${entry.owner}`,
          {
            hint: "one of the two is not what it says; set kv_connector_extra_config.handshake_key_file",
          },
        );
      }
      entry.metadata = metadata;
    }
    entry.users += 1;
    return name;
  }
}

function sameBytes(a: Uint8Array, b: Uint8Array): boolean {
  return a.byteLength === b.byteLength && a.every((byte, index) => byte === b[index]);
}
