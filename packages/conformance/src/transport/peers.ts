import { expect, test } from "vitest";
import { blockTable, bytes, type Fixture, readOf } from "./fixture.js";

export function peerTests(fixture: Fixture): void {
  const { waitFor, rejects } = fixture;

  test("agents have the requested name, or a unique default", async () => {
    const named = await fixture.agent("prefill 0/tp1");
    const [one, two] = [await fixture.agent(), await fixture.agent()];
    expect(named.name).toBe("prefill 0/tp1");
    expect(one.name).not.toBe(two.name);
    expect(one.name).toMatch(/^[\x20-\x7e]{1,255}$/);
    expect(one.backends.length).toBeGreaterThan(0);
  });

  test("invalid names and unknown backends are rejected", async () => {
    for (const name of ["", "x".repeat(256), "ü", "a\nb", "a\u0000b"]) {
      await rejects(
        () => fixture.transport.createAgent({ ...fixture.options.agentOptions, name }),
        "KV_AGENT_INVALID",
      );
    }
    const backends = [{ name: "NO_SUCH_BACKEND" }];
    const error = await rejects(
      () => fixture.transport.createAgent({ backends }),
      "KV_BACKEND_UNAVAILABLE",
    );
    expect(error.message).toContain("NO_SUCH_BACKEND");
  });

  test("addRemote returns the peer's name, and adding it again makes new memory reachable", async () => {
    const reader = await fixture.side(4096, 0);
    const owner = await fixture.side(4096, 1);
    const added = async () => reader.agent.addRemote(await waitFor(owner.agent.localMetadata()));
    expect(await waitFor(added())).toBe(owner.agent.name);
    const late = fixture.memory(4096);
    late.bytes.fill(77);
    await waitFor(owner.agent.register(late));
    expect(await waitFor(added())).toBe(owner.agent.name);
    expect(reader.agent.telemetry().remotes).toBe(1);
    const remote = await fixture.prepare(
      reader.agent,
      { ...owner, memory: late },
      [0, 1024, 1024, 4],
    );
    const local = await fixture.prepare(reader.agent, reader, [0, 1024, 1024, 4]);
    await waitFor(reader.agent.transfer(readOf({ local, remote }, Int32Array.of(0, 1, 2, 3))).done);
    expect(reader.memory.bytes.every((byte) => byte === 77)).toBe(true);
  });

  test("bytes that are no metadata are rejected, and the agent still works", async () => {
    const reader = await fixture.side(4096, 0);
    const owner = await fixture.side(4096, 1);
    for (const wrong of [new Uint8Array(0), bytes("no metadata"), new Uint8Array(300)]) {
      await rejects(() => reader.agent.addRemote(wrong), "KV_AGENT_METADATA_INVALID");
    }
    expect(reader.agent.telemetry().remotes).toBe(0);
    await fixture.blockLists(reader, owner, 1024);
  });

  test.runIf(fixture.options.detectsDamagedMetadata === true)(
    "metadata with any byte changed, or truncated anywhere, is rejected",
    async () => {
      const reader = await fixture.agent();
      const owner = await fixture.side(4096, 1);
      const metadata = await waitFor(owner.agent.localMetadata());
      for (let at = 0; at < metadata.length; at++) {
        const damaged = metadata.slice();
        damaged[at] = (damaged[at] as number) ^ (1 << (at % 8));
        await rejects(() => reader.addRemote(damaged), "KV_AGENT_METADATA_INVALID");
        await rejects(() => reader.addRemote(metadata.slice(0, at)), "KV_AGENT_METADATA_INVALID");
      }
      expect(reader.telemetry().remotes).toBe(0);
      expect(await waitFor(reader.addRemote(metadata))).toBe(owner.agent.name);
    },
  );

  test("calls with an unknown peer are rejected", async () => {
    const { agent, memory } = await fixture.side(4096, 0);
    const table = blockTable(memory, 1024);
    await rejects(() => agent.prepareRemote("unknown", table), "KV_AGENT_UNKNOWN_REMOTE");
    await rejects(() => agent.notify("unknown", bytes("x")), "KV_AGENT_UNKNOWN_REMOTE");
    await rejects(() => agent.removeRemote("unknown"), "KV_AGENT_UNKNOWN_REMOTE");
  });

  test("a peer cannot be removed while a prepared list refers to it", async () => {
    const { reader, owner, remote } = await fixture.blockPair(4096, 1024);
    await rejects(() => reader.agent.removeRemote(owner.agent.name), "KV_MEMORY_IN_USE");
    await waitFor(remote.close());
    await waitFor(reader.agent.removeRemote(owner.agent.name));
    expect(reader.agent.telemetry().remotes).toBe(0);
    await rejects(
      () => reader.agent.notify(owner.agent.name, bytes("x")),
      "KV_AGENT_UNKNOWN_REMOTE",
    );
    await fixture.introduce(reader.agent, owner.agent);
    expect(reader.agent.telemetry().remotes).toBe(1);
  });

  const { createMortal } = fixture.options;
  test.runIf(createMortal !== undefined)(
    "transfers with a dead peer fail, where the transport reports peer death",
    async () => {
      if (createMortal === undefined || !fixture.transport.capabilities.reportsPeerDeath) return;
      const reader = await fixture.side(4096, 0);
      const { transport, kill } = await createMortal();
      const agent = await waitFor(transport.createAgent({ ...fixture.options.agentOptions }));
      const memory = transport.allocate(4096);
      const owner = { agent, memory, registration: await waitFor(agent.register(memory)) };
      const request = readOf(await fixture.blockLists(reader, owner, 1024), Int32Array.of(0));
      const before = reader.agent.transfer(request);
      await waitFor(kill());
      // The transfer in flight may have any outcome.
      await waitFor(before.done.catch(() => {}));
      await waitFor(before.released);
      const { done, released } = reader.agent.transfer(request);
      await rejects(() => done, "KV_PEER_DISCONNECTED", "KV_TRANSFER_FAILED");
      await waitFor(released);
      expect(reader.agent.telemetry().transfersInFlight).toBe(0);
    },
  );
}
