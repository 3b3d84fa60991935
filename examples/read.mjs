import { fork } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { nixlTransport } from "@kv/nixl";

const BLOCK = 65_536;
const COUNT = 1024;
const transport = nixlTransport();
const agent = await transport.createAgent();
const memory = transport.allocate(BLOCK * COUNT);
await agent.register(memory);

if (process.argv[2] === "owner") {
  memory.bytes.fill(7);
  // Send the agent's metadata and the address of its memory over a side channel, here Node's IPC
  // channel.
  const metadata = Buffer.from(await agent.localMetadata()).toString("base64");
  process.send?.({ metadata, address: memory.address });
  for await (const { payload } of agent.notifications()) {
    console.log("owner: notified of", Buffer.from(payload).toString()); // owner: notified of read
    break;
  }
  process.disconnect();
} else {
  const owner = fork(fileURLToPath(import.meta.url), ["owner"]);
  const exited = once(owner, "exit");
  const [peer] = await once(owner, "message");
  const name = await agent.addRemote(Buffer.from(peer.metadata, "base64"));
  // One row describes all blocks: address, length, device, stride, count. A transfer names blocks
  // by their index.
  const localRows = Float64Array.of(memory.address, BLOCK, 0, BLOCK, COUNT);
  const remoteRows = Float64Array.of(peer.address, BLOCK, 0, BLOCK, COUNT);
  const local = await agent.prepareLocal({ memoryType: "DRAM", rows: localRows });
  const remote = await agent.prepareRemote(name, { memoryType: "DRAM", rows: remoteRows });
  const { done } = agent.transfer({
    operation: "READ",
    local,
    localIds: Int32Array.of(0, 1, 2),
    remote,
    remoteIds: Int32Array.of(3, 1, 4),
    notification: Buffer.from("read"), // delivered to the owner after the last byte
    timeoutMs: 5000,
  });
  const { lengthBytes } = await done;
  await exited;
  console.log("read", lengthBytes, "bytes; the last byte is", memory.bytes[3 * BLOCK - 1]); // read 196608 bytes; the last byte is 7
}
await transport.close();
memory.close();
