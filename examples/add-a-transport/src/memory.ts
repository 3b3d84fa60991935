import { KvError, type Memory } from "@kv/interface";

const PAGE = 4096;
const pins = new WeakMap<Memory, { count: number; closed: boolean }>();
let nextAddress = PAGE;

export function allocate(lengthBytes: number): Memory {
  if (!Number.isSafeInteger(lengthBytes) || lengthBytes < 1 || lengthBytes > 2 ** 40) {
    throw new KvError("KV_MEMORY_INVALID", `cannot allocate ${lengthBytes} bytes`);
  }
  const bytes = new Uint8Array(lengthBytes);
  const state = { count: 0, closed: false };
  const runsIn = (runs: Float64Array) => checkedRuns(runs, lengthBytes);
  const memory: Memory = {
    address: nextAddress,
    lengthBytes,
    memoryType: "DRAM",
    deviceId: 0,
    bytes,
    view(offset, length) {
      if (state.closed) throw new KvError("KV_MEMORY_INVALID", "the memory is closed");
      runsIn(Float64Array.of(offset, length));
      return bytes.subarray(offset, offset + length);
    },
    async gather(runs) {
      const taken = runsIn(runs).map(([offset, length]) => bytes.subarray(offset, offset + length));
      return new Uint8Array(Buffer.concat(taken)).buffer;
    },
    async scatter(runs, source) {
      const given = runsIn(runs);
      const total = given.reduce((sum, [, length]) => sum + length, 0);
      if (total !== source.byteLength) {
        throw new KvError(
          "KV_MEMORY_INVALID",
          `runs of ${total} bytes and a source of ${source.byteLength}`,
        );
      }
      let from = 0;
      for (const [offset, length] of given) {
        bytes.set(new Uint8Array(source, from, length), offset);
        from += length;
      }
      return source;
    },
    close() {
      if (state.count > 0) throw new KvError("KV_MEMORY_IN_USE", "the memory is still registered");
      state.closed = true;
    },
  };
  nextAddress += Math.ceil(lengthBytes / PAGE) * PAGE + PAGE;
  pins.set(memory, state);
  return memory;
}

/** Prevents the memory from closing until the returned function is called. Errors: `KV_MEMORY_INVALID`. */
export function pin(memory: Memory): () => void {
  const state = pins.get(memory);
  if (state === undefined || state.closed) {
    throw new KvError("KV_MEMORY_INVALID", "the memory is closed or belongs to another transport");
  }
  state.count++;
  let held = true;
  return () => {
    if (held) state.count--;
    held = false;
  };
}

function checkedRuns(runs: Float64Array, lengthBytes: number): [number, number][] {
  const pairs: [number, number][] = [];
  for (let at = 0; at < runs.length; at += 2) {
    const [offset = -1, length = -1] = runs.subarray(at, at + 2);
    const whole = Number.isSafeInteger(offset) && Number.isSafeInteger(length);
    if (!whole || offset < 0 || length < 0 || offset + length > lengthBytes) {
      throw new KvError(
        "KV_MEMORY_INVALID",
        `run ${offset}+${length} is not within ${lengthBytes} bytes`,
      );
    }
    pairs.push([offset, length]);
  }
  const total = pairs.reduce((sum, [, length]) => sum + length, 0);
  if (total > lengthBytes)
    throw new KvError("KV_MEMORY_INVALID", `runs of ${total} bytes repeat some`);
  return pairs;
}
