import type { Agent, DescriptorTable, PreparedList } from "@kv/interface";

/** Lists of local memory, shared by all remote engines whose plans cut it alike; closed with the last one that uses them. */
export interface LocalLists {
  acquire(key: string, table: () => DescriptorTable): Promise<PreparedList>;
  release(key: string): Promise<void>;
  readonly size: number;
}

export function createLocalLists(agent: Agent): LocalLists {
  const lists = new Map<string, { users: number; readonly list: Promise<PreparedList> }>();
  return {
    async acquire(key, table) {
      let entry = lists.get(key);
      if (entry === undefined) {
        entry = { users: 0, list: agent.prepareLocal(table()) };
        lists.set(key, entry);
      }
      entry.users += 1;
      try {
        return await entry.list;
      } catch (error) {
        entry.users -= 1;
        if (lists.get(key) === entry) lists.delete(key);
        throw error;
      }
    },
    async release(key) {
      const entry = lists.get(key);
      if (entry === undefined) return;
      entry.users -= 1;
      if (entry.users > 0) return;
      lists.delete(key);
      await (await entry.list).close();
    },
    get size() {
      return lists.size;
    },
  };
}
