import type { Memory, Transport } from "@kv/interface";

/** A transport that only allocates, on the heap, for tests without transfers. */
export function heapTransport(): Transport {
  let nextAddress = 4096;
  return {
    name: "heap",
    capabilities: {
      read: false,
      write: false,
      notifications: false,
      crossProcess: false,
      memoryTypes: ["DRAM"],
      reportsPeerDeath: false,
    },
    createAgent: () => Promise.reject(new Error("the heap has no agents")),
    allocate(lengthBytes) {
      const address = nextAddress;
      nextAddress += lengthBytes;
      return heapMemory(address, lengthBytes);
    },
    close: async () => {},
  };
}

function heapMemory(address: number, lengthBytes: number): Memory {
  const bytes = new Uint8Array(lengthBytes);
  return {
    address,
    lengthBytes,
    memoryType: "DRAM",
    deviceId: 0,
    bytes,
    view: (offsetBytes, viewBytes) => bytes.subarray(offsetBytes, offsetBytes + viewBytes),
    async gather(runs) {
      const pieces: Uint8Array[] = [];
      for (let i = 0; i < runs.length; i += 2) {
        const begin = runs[i] ?? 0;
        pieces.push(bytes.subarray(begin, begin + (runs[i + 1] ?? 0)));
      }
      const joined = new Uint8Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
      let at = 0;
      for (const piece of pieces) {
        joined.set(piece, at);
        at += piece.length;
      }
      return joined.buffer;
    },
    async scatter(runs, source) {
      let at = 0;
      for (let i = 0; i < runs.length; i += 2) {
        const length = runs[i + 1] ?? 0;
        bytes.set(new Uint8Array(source, at, length), runs[i] ?? 0);
        at += length;
      }
      return source;
    },
    close() {},
  };
}
