import { expect, test } from "vitest";
import { expectRefusal } from "../refusal.js";
import { blockLists, blocksOf, bytes, type Ground } from "./ground.js";

export function peerTests(ground: Ground): void {
  const { settle } = ground;

  test("agents keep the name they are given, and have names of their own otherwise", async () => {
    const named = await ground.agent("prefill 0/tp1");
    const [one, two] = [await ground.agent(), await ground.agent()];
    expect(named.name).toBe("prefill 0/tp1");
    expect(one.name).not.toBe(two.name);
    expect(one.name).toMatch(/^[\x20-\x7e]{1,255}$/);
    expect(one.backends.length).toBeGreaterThan(0);
  });

  test("names that are no names, and backends that do not exist, are refused", async () => {
    for (const name of ["", "x".repeat(256), "ü", "a\nb", "a\u0000b"]) {
      await expectRefusal(
        () => settle(ground.transport().createAgent({ ...ground.options.agentOptions, name })),
        "KV_AGENT_INVALID",
      );
    }
    const backends = [{ name: "NO_SUCH_BACKEND" }];
    const error = await expectRefusal(
      () => settle(ground.transport().createAgent({ backends })),
      "KV_BACKEND_UNAVAILABLE",
    );
    expect(error.message).toContain("NO_SUCH_BACKEND");
  });

  test("addRemote answers the peer's name; a second time is an update that brings new memory", async () => {
    const reader = await ground.side(4096, 0);
    const owner = await ground.side(4096, 1);
    expect(await settle(reader.agent.addRemote(await settle(owner.agent.localMetadata())))).toBe(
      owner.agent.name,
    );
    const late = ground.memory(4096);
    late.bytes.fill(77);
    await settle(owner.agent.register(late));
    expect(await settle(reader.agent.addRemote(await settle(owner.agent.localMetadata())))).toBe(
      owner.agent.name,
    );
    expect(reader.agent.telemetry().remotes).toBe(1);
    const table = { memoryType: late.memoryType, rows: blocksOf(late, 1024) };
    const remote = await settle(reader.agent.prepareRemote(owner.agent.name, table));
    const local = await settle(
      reader.agent.prepareLocal({
        memoryType: reader.memory.memoryType,
        rows: blocksOf(reader.memory, 1024),
      }),
    );
    const ids = Int32Array.of(0, 1, 2, 3);
    const { done } = reader.agent.transfer({
      operation: "READ",
      local,
      localIds: ids,
      remote,
      remoteIds: ids,
    });
    await settle(done);
    expect(reader.memory.bytes.every((byte) => byte === 77)).toBe(true);
  });

  test("bytes that are no metadata are refused, and the agent goes on", async () => {
    const reader = await ground.side(4096, 0);
    const owner = await ground.side(4096, 1);
    for (const wrong of [new Uint8Array(0), bytes("no metadata"), new Uint8Array(300)]) {
      await expectRefusal(() => settle(reader.agent.addRemote(wrong)), "KV_AGENT_METADATA_INVALID");
    }
    expect(reader.agent.telemetry().remotes).toBe(0);
    await blockLists(ground, reader, owner, 1024);
  });

  test.runIf(ground.options.detectsDamagedMetadata === true)(
    "metadata with any byte changed, or cut short anywhere, is refused",
    async () => {
      const reader = await ground.agent();
      const owner = await ground.side(4096, 1);
      const metadata = await settle(owner.agent.localMetadata());
      for (let at = 0; at < metadata.length; at++) {
        const damaged = metadata.slice();
        damaged[at] = (damaged[at] as number) ^ (1 << (at % 8));
        await expectRefusal(() => settle(reader.addRemote(damaged)), "KV_AGENT_METADATA_INVALID");
        await expectRefusal(
          () => settle(reader.addRemote(metadata.slice(0, at))),
          "KV_AGENT_METADATA_INVALID",
        );
      }
      expect(reader.telemetry().remotes).toBe(0);
      expect(await settle(reader.addRemote(metadata))).toBe(owner.agent.name);
    },
  );

  test("a peer that was never added is unknown to every call that names it", async () => {
    const { agent, memory } = await ground.side(4096, 0);
    const table = { memoryType: memory.memoryType, rows: blocksOf(memory, 1024) };
    await expectRefusal(() => settle(agent.prepareRemote("nobody", table)), "KV_AGENT_UNKNOWN_REMOTE");
    await expectRefusal(() => settle(agent.notify("nobody", bytes("x"))), "KV_AGENT_UNKNOWN_REMOTE");
    await expectRefusal(() => settle(agent.removeRemote("nobody")), "KV_AGENT_UNKNOWN_REMOTE");
  });

  test("a peer is forgotten only when no prepared list names it", async () => {
    const reader = await ground.side(4096, 0);
    const owner = await ground.side(4096, 1);
    const { remote } = await blockLists(ground, reader, owner, 1024);
    await expectRefusal(() => settle(reader.agent.removeRemote(owner.agent.name)), "KV_MEMORY_IN_USE");
    await settle(remote.close());
    await settle(reader.agent.removeRemote(owner.agent.name));
    expect(reader.agent.telemetry().remotes).toBe(0);
    await expectRefusal(
      () => settle(reader.agent.notify(owner.agent.name, bytes("x"))),
      "KV_AGENT_UNKNOWN_REMOTE",
    );
    await ground.introduce(reader.agent, owner.agent);
    expect(reader.agent.telemetry().remotes).toBe(1);
  });

  const { createMortal } = ground.options;
  test.runIf(createMortal !== undefined)(
    "the death of a peer fails what goes to it, where the transport reports it",
    async () => {
      if (createMortal === undefined || !ground.transport().capabilities.reportsPeerDeath) return;
      const reader = await ground.side(4096, 0);
      const { transport, kill } = await createMortal();
      const agent = await settle(transport.createAgent({ ...ground.options.agentOptions }));
      const memory = transport.allocate(4096);
      const owner = { agent, memory, registration: await settle(agent.register(memory)) };
      const { local, remote } = await blockLists(ground, reader, owner, 1024);
      const ids = Int32Array.of(0);
      const before = reader.agent.transfer({
        operation: "READ",
        local,
        localIds: ids,
        remote,
        remoteIds: ids,
      });
      await settle(kill());
      // What was under way ends as well, one way or the other.
      await settle(before.done.catch(() => {}));
      await settle(before.released);
      const { done, released } = reader.agent.transfer({
        operation: "READ",
        local,
        localIds: ids,
        remote,
        remoteIds: ids,
      });
      await expectRefusal(() => settle(done), "KV_PEER_DISCONNECTED", "KV_TRANSFER_FAILED");
      await settle(released);
      expect(reader.agent.telemetry().transfersInFlight).toBe(0);
    },
  );
}
