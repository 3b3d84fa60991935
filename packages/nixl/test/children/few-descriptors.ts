// What happens with few free file descriptors. `matrix`: leaves 0 to 32 and creates an agent, or
// two, or adds a peer, or connects to it. `owner`: a peer that has none for a while, as its parent
// tells it.
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
  const outcomes: Record<string, string[]> = { create: [], two: [], add: [], connect: [] };
  const transport = nixlTransport({ backends: [backend], env });
  /**
   * Adds a peer of this process and reads it: from `addRemote` on, or only from the first transfer
   * on, `left` descriptors are free.
   */
  const read = async (left: number, from: "add" | "connect") => {
    const [reader, owner] = [await transport.createAgent(), await transport.createAgent()];
    const [target, source] = [transport.allocate(LENGTH), transport.allocate(LENGTH)];
    await reader.register(target);
    await owner.register(source);
    const metadata = await owner.localMetadata();
    const local = await reader.prepareLocal({ memoryType: "DRAM", rows: rows(target.address) });
    if (from === "add") leave(left);
    const ended = await outcome(
      (async () => {
        await reader.addRemote(metadata);
        const table = { memoryType: "DRAM", rows: rows(source.address) } as const;
        const remote = await reader.prepareRemote(owner.name, table);
        if (from === "connect") leave(left);
        const ends = { local, localIds: ids, remote, remoteIds: ids };
        await reader.transfer({ operation: "READ", ...ends, timeoutMs: 300 }).done;
      })(),
    );
    free(held.length);
    await reader.close({ timeoutMs: 100 });
    await owner.close({ timeoutMs: 100 });
    target.close();
    source.close();
    return ended;
  };
  const first = await outcome(transport.createAgent());
  for (let left = 0; left <= 32; left += Number(step)) {
    leave(left);
    outcomes.create?.push(await outcome(transport.createAgent()));
    outcomes.two?.push(
      (
        await Promise.all([outcome(transport.createAgent()), outcome(transport.createAgent())])
      ).join(),
    );
    free(held.length);
    outcomes.add?.push(await read(left, "add"));
    outcomes.connect?.push(await read(left, "connect"));
  }
  await transport.close();
  process.stdout.write(JSON.stringify({ first, ...outcomes }));
} else {
  const errors: string[] = [];
  const log = {
    debug() {},
    info() {},
    warn() {},
    error: (event: string) => errors.push(event),
  } as Log;
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
