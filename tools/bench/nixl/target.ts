// usage: target.ts [BACKEND]. Memory to read and write, and a receiver of notifications that
// contain the time of their sending.
import { createInterface } from "node:readline";
import type { Agent, Memory } from "@kv/interface";
import { nixlTransport, sharedMemory } from "@kv/nixl";

type Command =
  | { do: "open"; lengthBytes: number; hugePages?: boolean; memoryType?: "DRAM" | "VRAM" }
  | { do: "know"; metadata: string; address: number }
  | { do: "listen"; count: number; work: boolean };

const BLOCK = 4096;
const transport = nixlTransport({ backends: [process.argv[2] ?? "UCX"] });
let agent: Agent;
let memory: Memory;
let peer: { name: string; address: number };
let heard: AsyncIterableIterator<{ payload: Uint8Array }>;

/** With `work` the agent reads small blocks at the same time. */
async function listen(count: number, work: boolean): Promise<number[]> {
  let over = false;
  const working = work ? readOn(() => over) : Promise.resolve();
  const delays: number[] = [];
  while (delays.length < count) {
    const { value } = await heard.next();
    delays.push(
      Number(process.hrtime.bigint() - BigInt(Buffer.from(value.payload).toString())) / 1e6,
    );
  }
  over = true;
  await working;
  return delays;
}

async function readOn(over: () => boolean) {
  const table = (address: number) => ({
    memoryType: "DRAM" as const,
    rows: Float64Array.of(address, BLOCK, 0, BLOCK, 64),
  });
  const local = await agent.prepareLocal(table(memory.address));
  const remote = await agent.prepareRemote(peer.name, table(peer.address));
  const ids = Int32Array.from({ length: 64 }, (_, i) => i);
  while (!over())
    await agent.transfer({ operation: "READ", local, localIds: ids, remote, remoteIds: ids }).done;
  await local.close();
  await remote.close();
}

function allocate({
  lengthBytes,
  hugePages,
  memoryType,
}: Extract<Command, { do: "open" }>): Memory {
  // V8 does not ask the kernel for huge pages.
  if (hugePages === false) return sharedMemory(new SharedArrayBuffer(lengthBytes));
  return transport.allocate(lengthBytes, { memoryType });
}

async function answer(command: Command): Promise<unknown> {
  if (command.do === "open") {
    agent = await transport.createAgent();
    memory = allocate(command);
    await agent.register(memory);
    heard = agent.notifications();
    const metadata = Buffer.from(await agent.localMetadata()).toString("hex");
    return { metadata, address: memory.address, name: agent.name, pid: process.pid };
  }
  if (command.do === "know") {
    peer = {
      name: await agent.addRemote(Buffer.from(command.metadata, "hex")),
      address: command.address,
    };
    return {};
  }
  return { delaysMs: await listen(command.count, command.work) };
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(`${JSON.stringify(await answer(JSON.parse(line) as Command))}\n`);
}
await transport.close();
