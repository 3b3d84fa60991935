import {
  descriptorRows,
  deviceMemory,
  doctor,
  findLibrary,
  hostMemory,
  installNixl,
  nixlTransport,
  objectMemory,
  openFileMemory,
} from "@kv/nixl";
import { afterAll, describe, expect, test } from "vitest";
import { FAKE } from "../support/libraries.js";

const BLOCK = 4096;
const transport = nixlTransport(FAKE.options);
afterAll(() => transport.close());

/** What is misspelt, as a compiler would refuse it. */
const wrong = (options: object): never => options as never;

test.each([
  ["checkMetadata", "KV_CONFIG_INVALID", () => nixlTransport(wrong({ checkMetdata: true }))],
  ["backends", "KV_CONFIG_INVALID", () => nixlTransport(wrong({ bakends: [] }))],
  ["populate", "KV_MEMORY_INVALID", () => transport.allocate(1, wrong({ poplate: false }))],
  ["deviceId", "KV_MEMORY_INVALID", () => deviceMemory(wrong({ deviceID: 1 }))],
  ["lengthBytes", "KV_MEMORY_INVALID", () => hostMemory(wrong({ lengthByte: 1 }))],
  ["lengthBytes", "KV_MEMORY_INVALID", () => objectMemory("key", wrong({ lengtBytes: 1 }))],
  ["lengthBytes", "KV_MEMORY_INVALID", () => openFileMemory("/x", wrong({ lengtBytes: 1 }))],
  ["timeoutMs", "KV_CONFIG_INVALID", () => doctor(wrong({ timeoutMS: 1 }))],
  ["library", "KV_LIBRARY_NOT_FOUND", () => findLibrary(wrong({ libary: "/x" }))],
  ["version", "KV_INSTALL_FAILED", () => installNixl(wrong({ verson: "1.5.0" }))],
  [
    "parameters",
    "KV_BACKEND_UNAVAILABLE",
    () => nixlTransport({ backends: [wrong({ name: "UCX", params: {} })] }),
  ],
] as const)(
  "F4: an option that is no option is refused, and %s is named",
  async (name, code, act) => {
    await expect((async () => act())()).rejects.toMatchObject({
      code,
      hint: expect.stringContaining(name),
    });
  },
);

describe.skipIf(FAKE.missing)(`an agent (${FAKE.missing ?? "fake found"})`, () => {
  test("F4: misspelt members of its calls are refused, and the nearest is named", async () => {
    await expect(transport.createAgent(wrong({ captureTelemtry: true }))).rejects.toMatchObject({
      code: "KV_AGENT_INVALID",
      hint: "did you mean captureTelemetry?",
    });
    await using agent = await transport.createAgent();
    const memory = transport.allocate(2 * BLOCK);
    await agent.register(memory);
    const rows = descriptorRows([
      { address: memory.address, lengthBytes: BLOCK },
      { address: memory.address + BLOCK, lengthBytes: BLOCK, deviceId: 0, count: 1 },
    ]);
    expect([...rows]).toEqual([
      ...[memory.address, BLOCK, 0, BLOCK, 1],
      ...[memory.address + BLOCK, BLOCK, 0, BLOCK, 1],
    ]);
    const local = await agent.prepareLocal({ memoryType: "DRAM", rows });
    const remote = await agent.prepareRemote(agent.name, { memoryType: "DRAM", rows });
    const ids = Int32Array.of(0);
    const request = { operation: "READ", local, localIds: ids, remote, remoteIds: ids } as const;
    expect(() => agent.transfer(wrong({ ...request, tiemoutMs: 5 }))).toThrow(
      expect.objectContaining({ code: "KV_TRANSFER_INVALID", hint: "did you mean timeoutMs?" }),
    );
    await expect(agent.close(wrong({ timeout: 5 }))).rejects.toMatchObject({
      code: "KV_AGENT_INVALID",
      hint: expect.stringContaining("timeoutMs"),
    });
    await expect(agent.prepareLocal(wrong({ memorytype: "DRAM", rows }))).rejects.toMatchObject({
      hint: "did you mean memoryType?",
    });

    // Infinity is no deadline, and 0 one that is over.
    await agent.transfer({ ...request, timeoutMs: Number.POSITIVE_INFINITY }).done;
    const prepared = await agent.prepareTransfer(request);
    expect(await prepared.backend()).toBe("UCX");
    await prepared.close();
    await expect(prepared.backend()).rejects.toMatchObject({ code: "KV_LIST_CLOSED" });
  });

  test("F8: a notification of a size that does not arrive is refused at the sender", async () => {
    await using agent = await transport.createAgent();
    await using peer = await transport.createAgent();
    await agent.addRemote(await peer.localMetadata());
    const longest = new Uint8Array(64 << 20);
    const arrived = peer.notifications().next();
    await agent.notify(peer.name, longest);
    expect((await arrived).value.payload.length).toBe(longest.length);
    await expect(agent.notify(peer.name, new Uint8Array(longest.length + 1))).rejects.toMatchObject(
      { code: "KV_NOTIFICATION_INVALID" },
    );
  });
});
