import { nixlTransport } from "@kv/nixl";

// Two agents in one process of QEMU: one READs three blocks of the other and notifies it.
const BLOCK = 65_536;
const COUNT = 16;
const transport = nixlTransport();
const owner = await transport.createAgent({ name: "owner" });
const reader = await transport.createAgent({ name: "reader" });
const [source, destination] = [
  transport.allocate(BLOCK * COUNT),
  transport.allocate(BLOCK * COUNT),
];
source.bytes.forEach((_, index) => {
  source.bytes[index] = index % 251;
});
await owner.register(source);
await reader.register(destination);
const name = await reader.addRemote(await owner.localMetadata());
const rows = (address: number) => Float64Array.of(address, BLOCK, 0, BLOCK, COUNT);
const local = await reader.prepareLocal({ memoryType: "DRAM", rows: rows(destination.address) });
const remote = await reader.prepareRemote(name, { memoryType: "DRAM", rows: rows(source.address) });
const notified = owner.notifications()[Symbol.asyncIterator]().next();
const { done } = reader.transfer({
  operation: "READ",
  local,
  localIds: Int32Array.of(0, 5, 9),
  remote,
  remoteIds: Int32Array.of(3, 1, 4),
  notification: Buffer.from("read"),
  timeoutMs: 30_000,
});
const { lengthBytes } = await done;
const { value } = await notified;
for (const [to, from] of [
  [0, 3],
  [5, 1],
  [9, 4],
] as const) {
  const [got, wanted] = [destination, source].map((memory, side) => {
    const block = side === 0 ? to : from;
    return Buffer.from(memory.bytes.slice(block * BLOCK, (block + 1) * BLOCK));
  });
  if (got === undefined || wanted === undefined || !got.equals(wanted))
    throw new Error(`block ${to} differs`);
}
console.log(
  `${process.arch}: read ${lengthBytes} bytes; notified of ${Buffer.from(value.payload).toString()}`,
);
await transport.close();
