import type { Memory } from "@kv/interface";
import type { NixlTransport } from "@kv/nixl";
import { expect } from "vitest";
import { blocksOf } from "../support/pair.js";
import { fillPattern, scattered } from "../support/pattern.js";

const BLOCK = 16_384;
const COUNT = 256;
const LENGTH = BLOCK * COUNT;
const ALL = Float64Array.of(0, LENGTH);

/**
 * Moves bytes from one agent's device memory to another's, on to host memory, and back: READ and
 * WRITE, between devices and between device and host, with blocks in changed places. The driver
 * copies what is compared.
 */
export async function movesThroughDevices(
  transport: NixlTransport,
  devices: readonly [number, number],
) {
  const [near, far] = [await transport.createAgent(), await transport.createAgent()];
  const [source, target] = [transport.allocate(LENGTH), transport.allocate(LENGTH)];
  const ofDevice = (deviceId: number) =>
    transport.allocate(LENGTH, { memoryType: "VRAM", deviceId });
  const [here, there] = [ofDevice(devices[0]), ofDevice(devices[1])];
  const bytesOf = async (memory: Memory) => new Uint8Array(await memory.gather(ALL));
  try {
    for (const memory of [source, target, here]) await near.register(memory);
    await far.register(there);
    await near.addRemote(await far.localMetadata());
    const remote = await near.prepareRemote(far.name, blocksOf(there, BLOCK, COUNT));
    /** Block i goes to or comes from remote block `i * step % COUNT`. */
    const move = async (operation: "READ" | "WRITE", memory: Memory, step: number) => {
      const local = await near.prepareLocal(blocksOf(memory, BLOCK, COUNT));
      const ids = { localIds: scattered(COUNT), remoteIds: scattered(COUNT, step) };
      const { lengthBytes } = await near.transfer({ operation, local, remote, ...ids }).done;
      expect(lengthBytes).toBe(LENGTH);
    };
    fillPattern(source.bytes, 5);
    await move("WRITE", source, 7);
    expect(same(await bytesOf(there), shuffled(source.bytes, 7))).toBe(true);
    await move("READ", here, 1);
    expect(same(await bytesOf(here), shuffled(source.bytes, 7))).toBe(true);
    await here.scatter(ALL, await source.gather(ALL));
    await move("WRITE", here, 1);
    await move("READ", target, 1);
    expect(same(target.bytes, source.bytes)).toBe(true);
  } finally {
    await near.close();
    await far.close();
    for (const memory of [here, there, source, target]) memory.close();
  }
}

function shuffled(bytes: Uint8Array, step: number): Uint8Array {
  const out = new Uint8Array(bytes.length);
  for (const [index, place] of scattered(COUNT, step).entries())
    out.set(bytes.subarray(index * BLOCK, (index + 1) * BLOCK), place * BLOCK);
  return out;
}

const same = (a: Uint8Array, b: Uint8Array) => Buffer.compare(a, b) === 0;
