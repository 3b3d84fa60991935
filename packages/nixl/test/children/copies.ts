// Copies that once ended the process. `scatter`: the source moves away and is collected while a
// thread copies it. `gather`: runs with more bytes together than a buffer can have. `long`: memory
// that is longer than one buffer may be.
import { pbkdf2 } from "node:crypto";
import { setImmediate as turn } from "node:timers/promises";
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";

const transport = nixlTransport();
const cases: Readonly<Record<string, () => Promise<string>>> = {
  async scatter() {
    const length = 32 << 20;
    const memory = transport.allocate(length);
    // Occupies libuv's threads, so that the copy begins late.
    for (let thread = 0; thread < 4; thread++) pbkdf2("a", "b", 1_000_000, 64, "sha512", () => {});
    const copy = () => {
      const source = new Uint8Array(length).fill(3).buffer;
      const copied = memory.scatter(Float64Array.of(0, length), source);
      // It has moved already, unless the copy was refused. Node 22 refuses to move it twice.
      if (source.byteLength > 0) structuredClone(source, { transfer: [source] });
      return copied;
    };
    const copied = copy();
    for (let round = 0; round < 5; round++) {
      globalThis.gc?.();
      await turn();
    }
    await copied;
    return `copied ${memory.bytes[0]} to ${memory.bytes[length - 1]}`;
  },
  async gather() {
    const memory = transport.allocate(2 ** 30, { populate: false });
    const runs = new Float64Array(2 * 4096).map((_, index) => (index % 2) * 2 ** 30);
    return memory.gather(runs).then(
      () => "gathered",
      (error: unknown) => (KvError.is(error) ? error.code : String(error)),
    );
  },
  async long() {
    const memory = transport.allocate(5 * 2 ** 30, { populate: false });
    memory.view(memory.lengthBytes - 1, 1)[0] = 7;
    globalThis.gc?.();
    return `${memory.view(memory.lengthBytes - 2, 2).join()}`;
  },
};
process.stdout.write((await cases[process.argv[2] ?? ""]?.()) ?? "no such case");
