import type {
  Agent,
  AgentOptions,
  DescriptorPairs,
  Memory,
  TransferOrder,
  Transport,
} from "@kv/interface";

/** Where blocks lie: in memory of this process, or where a peer says. */
export type Place = Pick<Memory, "address"> & Partial<Pick<Memory, "memoryType" | "deviceId">>;

/** A table of blocks side by side. */
export const blocksOf = (
  { address, memoryType = "DRAM", deviceId = 0 }: Place,
  lengthBytes: number,
  count: number,
) => ({ memoryType, rows: Float64Array.of(address, lengthBytes, deviceId, lengthBytes, count) });

/** Lists of an agent's memory and of that of the peer `name`, both in blocks. */
export async function listsOf(
  agent: Agent,
  memory: Place,
  name: string,
  theirs: Place,
  blockBytes: number,
  count: number,
) {
  const local = await agent.prepareLocal(blocksOf(memory, blockBytes, count));
  const remote = await agent.prepareRemote(name, blocksOf(theirs, blockBytes, count));
  /** Transfers the blocks `ids` of one list to or from the same blocks of the other. */
  const move = (
    operation: TransferOrder["operation"],
    ids: Int32Array,
    more: Partial<TransferOrder & DescriptorPairs> = {},
  ) => agent.transfer({ operation, local, localIds: ids, remote, remoteIds: ids, ...more });
  return { local, remote, move };
}

/** Two agents with memory. `reader`, which has the options, knows `owner` and has lists of both memories in blocks. */
export async function pairOf<A extends Agent, O extends AgentOptions = AgentOptions>(
  transport: Pick<Transport, "allocate"> & { createAgent(options?: O): Promise<A> },
  lengthBytes: number,
  blockBytes: number,
  options?: O,
) {
  const [reader, owner] = [await transport.createAgent(options), await transport.createAgent()];
  const [target, source] = [transport.allocate(lengthBytes), transport.allocate(lengthBytes)];
  const registration = await reader.register(target);
  await owner.register(source);
  await reader.addRemote(await owner.localMetadata());
  const count = lengthBytes / blockBytes;
  const lists = await listsOf(reader, target, owner.name, source, blockBytes, count);
  return {
    reader,
    owner,
    target,
    source,
    registration,
    ...lists,
    async close() {
      for (const agent of [reader, owner]) await agent.close();
      for (const memory of [target, source]) memory.close();
    },
  };
}

/** The texts of what `to` hears from `from`, until a marker that is sent behind all else. */
export async function textsUntilMarker(from: Agent, to: Agent): Promise<string[]> {
  await from.notify(to.name, Buffer.from("marker"));
  const texts: string[] = [];
  for await (const { payload } of to.notifications()) {
    texts.push(Buffer.from(payload).toString());
    if (texts.at(-1) === "marker") break;
  }
  return texts;
}
