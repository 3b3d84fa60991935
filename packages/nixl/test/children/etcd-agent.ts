// An agent of a host of its own, for the test of etcd across network namespaces: publishes its
// metadata, and fetches and reads a peer on request.
import { etcdMetadata, nixlTransport } from "@kv/nixl";

const LENGTH = 65_536;
const { name, endpoint, value } = JSON.parse(process.argv[2] ?? "{}") as {
  name: string;
  endpoint: string;
  value: number;
};
type Request = { readonly fetch: string; readonly address: number } | { readonly notify: string };

const transport = nixlTransport({ backends: ["UCX"], env: { UCX_TLS: "tcp" } });
const agent = await transport.createAgent({ name });
const memory = transport.allocate(LENGTH);
memory.bytes.fill(value);
await agent.register(memory);
const metadata = etcdMetadata(agent, {
  endpoints: [endpoint],
  leaseSeconds: 2,
  onGone: (gone) => process.send?.({ gone }),
});
await metadata.publish();
const table = (address: number) => ({
  memoryType: "DRAM" as const,
  rows: Float64Array.of(address, LENGTH, 0, LENGTH, 1),
});

async function answer(request: Request): Promise<unknown> {
  if ("notify" in request) {
    await agent.notify(request.notify, Buffer.from("hello"));
    return "sent";
  }
  const peer = await metadata.fetch(request.fetch, { timeoutMs: 20_000 });
  await using local = await agent.prepareLocal(table(memory.address));
  await using remote = await agent.prepareRemote(peer, table(request.address));
  await agent.transfer({
    operation: "READ",
    local,
    runs: Int32Array.of(0, 0, 1),
    remote,
    timeoutMs: 20_000,
  }).done;
  return memory.bytes[LENGTH - 1];
}
process.on("message", (request: Request) => {
  answer(request).then(
    (result) => process.send?.({ answer: result }),
    (error: { code?: string }) => process.send?.({ answer: error.code ?? String(error) }),
  );
});
process.send?.({ answer: memory.address });
