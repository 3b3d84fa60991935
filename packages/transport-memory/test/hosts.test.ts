import { KvError } from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";
import { expect, test } from "vitest";
import { bytes, collect, count, expectFailure, lists, pair, readAll, SLOW, TOTAL } from "./pair.js";

const NOTHING = {
  agents: 0,
  memories: 0,
  registrations: 0,
  transfers: 0,
  notifications: 0,
  listeners: 0,
  requests: 0,
};

test("when the owner is killed, transfers from it fail, its memory is gone, and nothing of it is outstanding", async () => {
  const { clock, network, reader, owner, notify, local, remote } = await pair({ latency: SLOW });
  const request = readAll({ local, remote });
  const { done, released } = reader.agent.transfer(request);
  await clock.advance(15);
  network.host("p").kill();
  await expectFailure(done, "KV_PEER_DISCONNECTED");
  await released;
  await clock.runUntilIdle();
  expect(count(reader.memory, 2)).toBe(TOTAL / 4);
  await expectFailure(reader.agent.transfer(request).done, "KV_PEER_DISCONNECTED");
  await expectFailure(notify("x"), "KV_NOTIFICATION_FAILED");
  await expectFailure(owner.agent.localMetadata(), "KV_AGENT_CLOSED");
  await expectFailure(owner.transport.createAgent(), "KV_TRANSPORT_CLOSED");
  network.host("d").kill();
  expect(network.outstanding()).toEqual(NOTHING);
  owner.memory.close();
  reader.memory.close();
  expect(clock.pendingTimers).toBe(0);
});

test("a hanging transfer fails when the peer is killed", async () => {
  const { clock, network, reader, local, remote } = await pair({
    faults: [{ fault: "drop", operation: "READ" }],
  });
  const { done, released } = reader.agent.transfer(readAll({ local, remote }));
  await clock.advance(1000);
  network.host("p").kill();
  await expectFailure(done, "KV_PEER_DISCONNECTED");
  await released;
});

test("when the reader is killed, no further byte lands, and its promises and timers never fire", async () => {
  const { clock, network, reader, owner, local, remote } = await pair({ latency: SLOW });
  const write = readAll({ local, remote }, { operation: "WRITE" });
  const { done, released } = reader.agent.transfer(write);
  let heard = "";
  void Promise.race([done, released]).then(
    () => (heard = "settled"),
    () => (heard = "settled"),
  );
  const host = network.host("d");
  host.clock.setTimer(() => (heard = "timer"), 20);
  await clock.advance(15);
  host.kill();
  host.clock.setTimer(() => (heard = "timer after death"), 1);
  await clock.advance(10_000);
  expect(heard).toBe("");
  expect(count(owner.memory, 1)).toBe(TOTAL / 4);
  expect(network.outstanding()).toMatchObject({ agents: 1, transfers: 0 });
  await reader.agent.close();
});

test("notifications in flight from a killed host arrive with the configured probability", async () => {
  for (const [deliverInFlight, expected] of [
    [0, 0],
    [1, 40],
  ] as const) {
    const { clock, network, owner, notify } = await pair({ latency: SLOW });
    const words = collect(owner.agent);
    for (let index = 0; index < 40; index++) await notify("x");
    network.host("d").kill({ deliverInFlight });
    await clock.runUntilIdle();
    expect(words.length).toBe(expected);
  }
});

test("a restarted host is another process: old metadata and lists fail, new ones reach the new agent", async () => {
  const { clock, network, begin, reader, owner, local, remote } = await pair();
  const request = readAll({ local, remote });
  const oldMetadata = await owner.agent.localMetadata();
  expect(network.restart("p").incarnation).toBe(2);
  const again = await begin("p", 5);
  expect(again.agent.name).toBe(owner.agent.name);
  await expectFailure(reader.agent.transfer(request).done, "KV_PEER_DISCONNECTED");
  const words = collect(again.agent);
  // The peer is known by its old incarnation, so the new agent of the same name is not reached.
  await expect(reader.agent.notify(again.agent.name, bytes("old"))).rejects.toThrow(KvError);
  const fresh = await lists(reader, again);
  await clock.settle(reader.agent.transfer({ ...request, ...fresh }).done);
  expect(count(reader.memory, 5)).toBe(TOTAL);
  await reader.agent.addRemote(oldMetadata);
  await expect(reader.agent.notify(again.agent.name, bytes("old"))).rejects.toThrow(KvError);
  await clock.runUntilIdle();
  expect(words).toEqual([]);
});

test("without reportsPeerDeath only the deadline ends a transfer", async () => {
  const { clock, network, reader, notify, local, remote } = await pair({
    reportsPeerDeath: false,
  });
  expect(reader.transport.capabilities.reportsPeerDeath).toBe(false);
  network.host("p").kill();
  const request = readAll({ local, remote }, { timeoutMs: 700 });
  const { done, released } = reader.agent.transfer(request);
  await notify("into the void");
  await expectFailure(clock.settle(done), "KV_TRANSFER_TIMEOUT");
  await clock.settle(released);
  expect(clock.now()).toBeLessThan(800);
});

test("a transfer fails when the owner deregisters its memory", async () => {
  const { clock, reader, owner, local, remote } = await pair({ latency: SLOW });
  const { done } = reader.agent.transfer(readAll({ local, remote }));
  await clock.advance(15);
  await owner.agent.close();
  await expectFailure(clock.settle(done), "KV_PEER_DISCONNECTED");
});

test("closing an agent waits for its transfers, and aborts those that do not end", async () => {
  const { clock, reader, local, remote, network } = await pair({
    latency: SLOW,
    faults: [{ fault: "drop", nth: 2 }],
  });
  const request = readAll({ local, remote });
  const good = reader.agent.transfer(request).done;
  const stuck = reader.agent.transfer(request).done;
  await clock.settle(reader.agent.close({ timeoutMs: 3000 }));
  expect(clock.now()).toBe(3005);
  expect((await good).lengthBytes).toBe(TOTAL);
  await expectFailure(stuck, "KV_TRANSFER_ABORTED");
  expect(network.outstanding()).toMatchObject({ agents: 1, transfers: 0, registrations: 1 });
});

test("clocks of hosts differ by their skew, also after a restart", async () => {
  const { clock, network } = await pair();
  const host = network.host("late", { skewMs: -250 });
  await clock.advance(1000);
  expect(host.clock.now()).toBe(750);
  expect(network.restart("late").clock.now()).toBe(750);
});

test("agent names are unique among live agents", async () => {
  const { network, reader } = await pair();
  const transport = memoryTransport({ network, host: "d" });
  await expectFailure(transport.createAgent({ name: reader.agent.name }), "KV_AGENT_INVALID");
});

test("VRAM is simulated on request: no view, but gather, scatter and transfers work", async () => {
  await using transport = memoryTransport({ memoryTypes: ["VRAM"] });
  using memory = transport.allocate(64, { memoryType: "VRAM", deviceId: 3 });
  expect(() => memory.bytes).toThrow("not addressable");
  await memory.scatter(Float64Array.of(8, 4), Uint8Array.of(1, 2, 3, 4).buffer);
  expect([...new Uint8Array(await memory.gather(Float64Array.of(9, 2)))]).toEqual([2, 3]);
  await using agent = await transport.createAgent();
  await agent.register(memory);
  const rows = Float64Array.of(memory.address, 64, 3, 64, 1);
  expect((await agent.prepareLocal({ memoryType: "VRAM", rows })).count).toBe(1);
  await expect(agent.prepareLocal({ memoryType: "DRAM", rows })).rejects.toThrow(
    "is VRAM of device 3",
  );
});

test("await using closes agents and the transport, and using frees memory", async () => {
  const { network } = await pair();
  {
    await using transport = memoryTransport({ network, host: "disposed" });
    using memory = transport.allocate(4096);
    await using agent = await transport.createAgent();
    const registration = await agent.register(memory);
    await registration.close();
    expect(network.outstanding()).toMatchObject({ agents: 3, memories: 3 });
  }
  expect(network.outstanding()).toMatchObject({ agents: 2, memories: 2 });
});
