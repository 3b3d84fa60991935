// Opens a pool with a file, says what it has, and puts prefixes until somebody kills it.
// Arguments: the file, or the URL of an object store; a seed. Lines on stdout: `found NAME`, `torn NAME`, `damaged COUNT`, `ready`;
// then `put NAME` before a block is put, `gone NAME` for each that is evicted for it, `began NAME`,
// and `kept NAME` when it was acknowledged.
import { writeSync } from "node:fs";
import { nixlTransport } from "@kv/nixl";
import { BlockFile } from "../../src/block-file.js";
import { BlockPool } from "../../src/block-pool.js";
import { openNixlDisk } from "../../src/nixl-disk.js";
import { openObjectDisk } from "../../src/object-disk.js";
import { CHAIN, CHAINS, NAMESPACE, PLACES, SLOTS } from "./put-blocks-sizes.js";

const [path = "", seed = "0"] = process.argv.slice(2);
const { blockLengthBytes } = NAMESPACE;
const transport = nixlTransport({ backends: ["POSIX"] });
const memory = transport.allocate(SLOTS * blockLengthBytes);
const limitBytes = PLACES * (blockLengthBytes + 4096);
const storage = { transport, memory, limitBytes, blockLengthBytes };
const parameters = { bucket: "kv-pool", endpoint_override: path, scheme: "http" };
const disk = path.startsWith("http:")
  ? await openObjectDisk({ ...storage, parameters, name: "killed" })
  : await openNixlDisk({ ...storage, path });
const pool = new BlockPool({
  memory,
  blockLengthBytes,
  file: new BlockFile(disk, NAMESPACE),
});
const say = (line: string) => void writeSync(1, `${line}\n`);

/** Each word of a block says which block it is. */
function bytesOf(name: string): Uint8Array {
  const [chain = 0, at = 0] = name.split("-").map(Number);
  return new Uint8Array(new Uint32Array(blockLengthBytes / 4).fill(chain * 1000 + at).buffer);
}

/** Acknowledged, and not evicted since. */
const kept = new Set<string>();

const namesOf = (chain: number) => Array.from({ length: CHAIN }, (_, at) => `${chain}-${at}`);

for (let chain = 0; chain < CHAINS; chain += 1)
  for (const name of namesOf(chain)) {
    const [slot] = await pool.pin([Buffer.from(name)]);
    if (slot === undefined) continue;
    kept.add(name);
    const bytes = memory.view(slot * blockLengthBytes, blockLengthBytes);
    say(`${Buffer.compare(bytes, bytesOf(name)) === 0 ? "found" : "torn"} ${name}`);
    pool.unpin([slot]);
  }
say(`damaged ${pool.status().damaged}`);
say("ready");

let random = Number(seed);
for (;;) {
  random = (random * 1103515245 + 12345) % 2 ** 31;
  const names = namesOf(random % CHAINS);
  await Promise.all(
    names.map(async (name, at) => {
      const key = Buffer.from(name);
      const parent = at === 0 ? undefined : Buffer.from(names[at - 1] ?? "");
      if (pool.has(key)) return;
      say(`put ${name}`);
      const isKept = pool.put(key, parent, bytesOf(name));
      for (const each of kept) {
        if (pool.has(Buffer.from(each))) continue;
        kept.delete(each);
        say(`gone ${each}`);
      }
      say(`began ${name}`);
      if (!(await isKept)) return;
      kept.add(name);
      say(`kept ${name}`);
    }),
  );
}
