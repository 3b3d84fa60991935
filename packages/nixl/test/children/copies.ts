// The source of a copy moves away and is collected while a thread copies it.
import { pbkdf2 } from "node:crypto";
import { setImmediate as turn } from "node:timers/promises";
import { nixlTransport } from "@kv/nixl";

const LENGTH = 32 << 20;
const memory = nixlTransport().allocate(LENGTH);
// Occupies libuv's threads, so that the copy begins late.
for (let thread = 0; thread < 4; thread++) pbkdf2("a", "b", 1_000_000, 64, "sha512", () => {});

function copy(): Promise<ArrayBuffer> {
  const source = new Uint8Array(LENGTH).fill(3).buffer;
  const copied = memory.scatter(Float64Array.of(0, LENGTH), source);
  // It has moved already, unless the copy was refused. Node 22 refuses to move it twice.
  if (source.byteLength > 0) structuredClone(source, { transfer: [source] });
  return copied;
}

const copied = copy();
for (let round = 0; round < 5; round++) {
  globalThis.gc?.();
  await turn();
}
await copied;
process.stdout.write(`copied ${memory.bytes[0]} to ${memory.bytes[LENGTH - 1]}`);
