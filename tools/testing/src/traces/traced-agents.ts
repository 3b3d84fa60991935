import {
  type Agent,
  DESCRIPTOR_ROW,
  type DescriptorTable,
  descriptorPairs,
  type KvCacheRegion,
  type PreparedList,
} from "@kv/interface";
import { blockRanges, describeNotification } from "./wire-text.js";

interface Block {
  readonly engine: string;
  readonly region: string;
  readonly blockId: number;
}

/** `way` is an arrow, and the rank at the other end. */
type Say = (way: string, what: string) => void;

/** Tells addresses of transfers as blocks, and agents as ranks. */
export class TracedAgents {
  readonly #regions: (KvCacheRegion & { readonly engine: string })[] = [];
  readonly #ranks = new Map<string, string>();
  readonly #lists = new WeakMap<PreparedList, readonly Block[]>();

  register(engine: string, regions: readonly KvCacheRegion[]): void {
    this.#regions.push(...regions.map((region) => ({ ...region, engine })));
  }

  /** Each transfer and notification is told to `say`. */
  observed(agent: Agent, rank: string, say: Say): Agent {
    this.#ranks.set(agent.name, rank);
    const nameOf = (agentName: string | undefined) =>
      this.#ranks.get(String(agentName)) ?? String(agentName);
    const prepared = async (table: DescriptorTable, prepare: () => Promise<PreparedList>) => {
      const blocks = this.#blocksOf(table);
      const list = await prepare();
      this.#lists.set(list, blocks);
      return list;
    };
    return {
      ...agent,
      prepareLocal: (table) => prepared(table, () => agent.prepareLocal(table)),
      prepareRemote: (remote, table) => prepared(table, () => agent.prepareRemote(remote, table)),
      transfer: (request) => {
        const { operation, notification } = request;
        const peer = nameOf(request.remote.remote);
        const { localIds, remoteIds } = descriptorPairs(request);
        const [here, there] = [
          this.#text(request.local, localIds),
          this.#text(request.remote, remoteIds),
        ];
        say(
          `-> ${peer}`,
          operation === "READ" ? `READ ${there} into ${here}` : `WRITE ${here} into ${there}`,
        );
        const transfer = agent.transfer(request);
        transfer.done.then(
          () => {
            say(`<- ${peer}`, `${operation} is done`);
            if (notification !== undefined) say(`-> ${peer}`, describeNotification(notification));
          },
          (error: unknown) => {
            say(`<- ${peer}`, `${operation} fails: ${codeOf(error)}`);
            void transfer.released.then(() =>
              say(`<- ${peer}`, `${operation} no longer touches memory`),
            );
          },
        );
        return transfer;
      },
      notify: (remote, payload) => {
        const sent = agent.notify(remote, payload);
        const tell = (failure: string) =>
          say(`-> ${nameOf(remote)}`, describeNotification(payload) + failure);
        sent.then(
          () => tell(""),
          (error: unknown) => tell(`: not sent, ${codeOf(error)}`),
        );
        return sent;
      },
    };
  }

  #text(list: PreparedList, ids: Int32Array): string {
    const blocks = [...ids].flatMap((id) => this.#lists.get(list)?.[id] ?? []);
    const { engine = "" } = blocks[0] ?? {};
    const regions = new Set(blocks.map(({ region }) => region));
    const isWhole = this.#regions.every(
      ({ engine: owner, name }) => owner !== engine || regions.has(name),
    );
    const ranges = blockRanges(blocks.map(({ blockId }) => blockId));
    return `${engine} ${ranges}${isWhole ? "" : ` of ${[...regions].join()}`}`;
  }

  #blocksOf({ rows }: DescriptorTable): readonly Block[] {
    const blocks: Block[] = [];
    for (let row = 0; row < rows.length; row += DESCRIPTOR_ROW) {
      const [address = 0, , , strideBytes = 0, count = 0] = rows.subarray(
        row,
        row + DESCRIPTOR_ROW,
      );
      for (let i = 0; i < count; i++) blocks.push(this.#blockAt(address + i * strideBytes));
    }
    return blocks;
  }

  #blockAt(address: number): Block {
    for (const { engine, name, memory, offsetBytes, blockStrideBytes, numBlocks } of this
      .#regions) {
      const blockId = Math.floor((address - memory.address - offsetBytes) / blockStrideBytes);
      if (blockId >= 0 && blockId < numBlocks) return { engine, region: name, blockId };
    }
    throw new Error(`no engine's cache has the address ${address}`);
  }
}

export function codeOf(error: unknown): string {
  return (error as { readonly code?: string }).code ?? String(error);
}
