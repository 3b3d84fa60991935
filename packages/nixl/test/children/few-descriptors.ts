// What happens with few free file descriptors. `matrix`: leaves 0 to 32 and creates agents, or adds and reads a peer. `owner`: a peer that has none for
// a while, as its parent tells it.
import { closeSync, openSync } from "node:fs";
import { KvError, type Log } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";

const [role, backend = "UCX", step = "8"] = process.argv.slice(2);
const held: number[] = [];
/** Takes all descriptors but `left`. */
function leave(left: number): void {
  try {
    for (;;) held.push(openSync("/dev/null", "r"));
  } catch {
    free(left);
  }
}
function free(count: number): void {
  for (const descriptor of held.splice(-count, count === 0 ? 0 : count)) closeSync(descriptor);
}
const env = backend === "UCX" ? { UCX_TLS: "tcp" } : {};
const LENGTH = 1 << 20;
const rows = (base: number) => Float64Array.of(base, 65_536, 0, 65_536, 16);
const ids = Int32Array.from({ length: 16 }, (_, index) => index);
const outcome = (call: Promise<unknown>) =>
  call.then(
    () => "done",
    (error: unknown) => (KvError.is(error) ? error.code : String(error)),
  );

if (role === "matrix") {
  const outcomes: Record<string, string[]> = { create: [], two: [], add: [] };
  const transport = nixlTransport({ backends: [backend], env });
  const first = await outcome(transport.createAgent());
  for (let left = 0; left <= 32; left += Number(step)) {
    leave(left);
    outcomes.create?.push(await outcome(transport.createAgent()));
    outcomes.two?.push(
      (await Promise.all([outcome(transport.createAgent()), outcome(transport.createAgent())])).join(),
    );
    free(held.length);
    const [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
    const [target, source] = [transport.allocate(LENGTH), transport.allocate(LENGTH)];
    await reader.register(target);
    await owner.register(source);
    const metadata = await owner.localMetadata();
    const local = await reader.prepareLocal({ memoryType: "DRAM", rows: rows(target.address) });
    leave(left);
    const add = async () => {
      await reader.addRemote(metadata);
      const remote = await reader.prepareRemote(owner.name, {
        memoryType: "DRAM",
        rows: rows(source.address),
      });
      await reader.transfer({
        operation: "READ",
        local,
        localIds: ids,
        remote,
        remoteIds: ids,
        timeoutMs: 300,
      }).done;
    };
    outcomes.add?.push(await outcome(add()));
    free(held.length);
    await reader.close({ timeoutMs: 100 });
    await owner.close({ timeoutMs: 100 });
    target.close();
    source.close();
  }
  await transport.close();
  process.stdout.write(JSON.stringify({ first, ...outcomes }));
} else {
  const errors: string[] = [];
  const log = { debug() {}, info() {}, warn() {}, error: (event: string) => errors.push(event) } as Log;
  const transport = nixlTransport({ backends: [backend], env, log });
  const agent = await transport.createAgent();
  const memory = transport.allocate(LENGTH);
  await agent.register(memory);
  process.on("message", (message) => {
    if (message === "fill") leave(0);
    else if (message === "free") free(held.length);
    process.send?.({ errors });
  });
  const metadata = Buffer.from(await agent.localMetadata()).toString("base64");
  process.send?.({ name: agent.name, address: memory.address, metadata });
}
