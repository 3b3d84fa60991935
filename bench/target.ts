// The process whose memory both sides of a benchmark read. It registers memory, prints its address, and waits until its stdin ends.
import { createInterface } from "node:readline";
import { nixlTransport } from "@kv/nixl";

const transport = nixlTransport();
for await (const line of createInterface({ input: process.stdin })) {
  const { lengthBytes } = JSON.parse(line) as { lengthBytes: number };
  const agent = await transport.createAgent();
  const memory = transport.allocate(lengthBytes);
  const words = new Uint32Array(memory.bytes.buffer, memory.bytes.byteOffset, lengthBytes / 4);
  for (let i = 0; i < words.length; i += 1024) words[i] = i;
  await agent.register(memory);
  const metadata = Buffer.from(await agent.localMetadata()).toString("hex");
  process.stdout.write(`${JSON.stringify({ metadata, address: memory.address })}\n`);
}
await transport.close();
