// A pool over NIXL that has the first blocks of a prompt, and ends in a phase of a fetch.
// Arguments: its namespace, the phase (look-up, fetch, transfer, never), how (politely,
// by force), blocks, a folder. Prints the pool's peer.
import { delegateTo } from "@kv/connector/building-blocks";
import type { Agent, Transport } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { type Namespace, offloadKey } from "@kv/tier";
import { openPool } from "../../../../packages/pool/src/index.js";
import { blockHashes } from "../../src/engine/cache/block-pool.js";
import { arithmeticModel } from "./arithmetic-model.js";
import { BLOCK, PROMPT } from "./tier-prompt.js";

const [like = "", phase = "never", how = "politely", count = "12", folder] = process.argv.slice(2);
const host = "127.0.0.1";
const namespace = JSON.parse(like) as Namespace;

async function end() {
  if (how === "by force") process.kill(process.pid, "SIGKILL");
  await pool.drain(5000);
  await pool.close();
  await transport.close();
  process.stdin.destroy();
}

const real: Transport = nixlTransport();
const transport: Transport = delegateTo(real, {
  createAgent: async (options) => {
    const agent: Agent = await real.createAgent(options);
    return delegateTo(agent, {
      transfer(request) {
        const transfer = agent.transfer(request);
        if (phase === "transfer") void end();
        return transfer;
      },
    });
  },
});
const pool = await openPool({
  ...namespace,
  transport,
  host,
  port: 0,
  memoryBytes: 64 * namespace.blockLengthBytes,
  files: folder === undefined ? undefined : { folder, limitBytes: 2 ** 20 },
});

const model = arithmeticModel();
let parent: Uint8Array | undefined;
for (const [at, hash] of blockHashes(PROMPT, BLOCK).slice(0, Number(count)).entries()) {
  const tokens = Int32Array.from(PROMPT.slice(at * BLOCK, (at + 1) * BLOCK));
  const { newKv } = await model.forward({ sequenceId: "s", tokens, position: at * BLOCK });
  const key = offloadKey(Buffer.from(hash, "base64"));
  if (typeof newKv !== "function") await pool.blocks.put(key, parent, new Uint8Array(newKv));
  parent = key;
}

const pin = pool.blocks.pin.bind(pool.blocks);
pool.blocks.pin = async (keys) => {
  if (phase === "look-up") void end();
  const slots = await pin(keys);
  // The answer to the look-up leaves first.
  if (phase === "fetch") setImmediate(() => void end());
  return slots;
};
process.stdin.on("end", () => process.exit()).resume();
console.log(pool.localId);
