import { createHash } from "node:crypto";
import { findLibrary, nixlTransport } from "@kv/nixl";
import { expect } from "vitest";
import { listsOf } from "../support/pair.js";
import { fillPattern, scattered } from "../support/pattern.js";
import { type PythonPeerOptions, startPythonPeer } from "../support/python-peer.js";

const BLOCK = 65_536;
const COUNT = 128;
const LENGTH = BLOCK * COUNT;

/** READ from and WRITE to memory of a Python process; compares the bytes of both sides by hash. */
export async function movesWithPython(memory: PythonPeerOptions["memory"]): Promise<void> {
  const peer = await startPythonPeer({
    library: await findLibrary(),
    memory,
    device: 0,
    lengthBytes: LENGTH,
  });
  const transport = nixlTransport({ backends: ["UCX"] });
  const agent = await transport.createAgent();
  const host = transport.allocate(LENGTH);
  await agent.register(host);
  expect(await agent.addRemote(peer.metadata)).toBe(peer.name);
  const theirs = { ...peer, memoryType: memory === "host" ? "DRAM" : "VRAM" } as const;
  const lists = await listsOf(agent, host, peer.name, theirs, BLOCK, COUNT);
  const move = (operation: "READ" | "WRITE") => lists.move(operation, scattered(COUNT, 5)).done;
  const hash = () => createHash("sha256").update(host.bytes).digest("hex");

  await move("READ");
  expect(hash()).toBe(await peer.hash());
  fillPattern(host.bytes, 9);
  expect(hash()).not.toBe(await peer.hash());
  await move("WRITE");
  expect(await peer.hash()).toBe(hash());

  await transport.close();
  host.close();
  expect(await peer.end()).toBe(0);
}
