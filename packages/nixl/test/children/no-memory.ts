// Uses two agents whose threads have no memory at one moment. Prints, as JSON, the codes of what
// failed, and whether all that was counted was given back. Ends with an error when a promise does
// not settle.
import { setTimeout as sleep } from "node:timers/promises";
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { blocksOf } from "../support/pair.js";

const transport = nixlTransport({ library: process.argv[2], backends: ["UCX"] });
const failed: string[] = [];
const LENGTH = 64 * 4096;

async function settled<T>(what: Promise<T>): Promise<T | undefined> {
  const late = sleep(10_000, undefined, { ref: false }).then(() => {
    throw new Error("a promise does not settle");
  });
  try {
    return await Promise.race([what, late]);
  } catch (error) {
    if (!KvError.is(error)) throw error;
    failed.push(error.code);
    return undefined;
  }
}

const memory = transport.allocate(LENGTH, { populate: false });
const [agent, peer] = [
  await settled(transport.createAgent({ name: "one" })),
  await settled(transport.createAgent({ name: "two" })),
];
let given: object = {};
if (agent !== undefined && peer !== undefined) {
  await settled(agent.register(memory));
  const metadata = await settled(peer.localMetadata());
  if (metadata !== undefined) await settled(agent.addRemote(metadata));
  const table = blocksOf(memory, 4096, 64);
  const local = await settled(agent.prepareLocal(table));
  const remote = await settled(agent.prepareRemote(agent.name, table));
  for (let round = 0; round < 20; round++) {
    await settled(agent.notify("two", Buffer.from("hello")));
    if (local === undefined || remote === undefined) continue;
    const runs = Int32Array.of(0, 0, 64);
    const transfer = await settled(
      (async () => agent.transfer({ operation: "READ", local, remote, runs }))(),
    );
    if (transfer === undefined) continue;
    await settled(transfer.done);
    await settled(transfer.released);
  }
  if (local !== undefined) await settled(local.close());
  if (remote !== undefined) await settled(remote.close());
  const { transfersPosted, transfersDone, transfersFailed, transfersInFlight, preparedLists } =
    agent.telemetry();
  given = {
    ended: transfersPosted - transfersDone - transfersFailed,
    transfersInFlight,
    preparedLists,
  };
}
await settled(transport.close());
memory.close();
console.log(JSON.stringify({ failed: [...new Set(failed)], given }));
