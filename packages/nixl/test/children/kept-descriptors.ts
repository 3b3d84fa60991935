// Moves bytes between two agents over TCP, and prints the links of the descriptors that a child of
// this process would inherit and that were not there before, as JSON.
import { readdirSync, readFileSync, readlinkSync } from "node:fs";
import { nixlTransport } from "@kv/nixl";
import { pairOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";

const CLOSE_ON_EXEC = 0o2000000;

function inheritable(): string[] {
  return readdirSync("/proc/self/fd").flatMap((name) => {
    try {
      const info = readFileSync(`/proc/self/fdinfo/${name}`, "utf8");
      const flags = Number.parseInt(/^flags:\s*(\d+)/m.exec(info)?.[1] ?? "0", 8);
      return flags & CLOSE_ON_EXEC ? [] : [`${name} ${readlinkSync(`/proc/self/fd/${name}`)}`];
    } catch {
      return [];
    }
  });
}

const before = inheritable();
const transport = nixlTransport({ env: { UCX_TLS: "tcp" } });
const { target, source, move, close } = await pairOf(transport, 1 << 20, 4096);
source.bytes.fill(7);
await move("READ", scattered(256)).done;
const after = inheritable().filter((each) => !before.includes(each));
console.log(JSON.stringify({ moved: target.bytes[0], after }));
await close();
