// What happens with few free file descriptors. `matrix`: leaves 0 to 32 and creates an agent, or
// two, or adds a peer, or connects to it. `owner`: a peer that has none for a while, as its parent
// tells it.
import { closeSync, openSync } from "node:fs";
import { silentLog } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { codeOf } from "../support/code-of.js";
import { listsOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";

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
const BLOCK = 65_536;
const COUNT = LENGTH / BLOCK;

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
    if (from === "add") leave(left);
    const reads = async () => {
      await reader.addRemote(metadata);
      const { move } = await listsOf(reader, target, owner.name, source, BLOCK, COUNT);
      if (from === "connect") leave(left);
      await move("READ", scattered(COUNT), { timeoutMs: 300 }).done;
    };
    const ended = await codeOf(reads());
    free(held.length);
    for (const agent of [reader, owner]) await agent.close({ timeoutMs: 100 });
    for (const memory of [target, source]) memory.close();
    return ended;
  };
  const first = await codeOf(transport.createAgent());
  for (let left = 0; left <= 32; left += Number(step)) {
    leave(left);
    const create = () => codeOf(transport.createAgent());
    outcomes.create?.push(await create());
    outcomes.two?.push((await Promise.all([create(), create()])).join());
    free(held.length);
    outcomes.add?.push(await read(left, "add"));
    outcomes.connect?.push(await read(left, "connect"));
  }
  await transport.close();
  process.stdout.write(JSON.stringify({ first, ...outcomes }));
} else {
  const errors: string[] = [];
  const log = { ...silentLog, error: (event: string) => void errors.push(event) };
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
