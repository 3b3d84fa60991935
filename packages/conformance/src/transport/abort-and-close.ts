import { KvError, type Transfer } from "@kv/interface";
import { expect, test } from "vitest";
import { expectError, expectThrown } from "../expect-error.js";
import {
  blockPair,
  blocksOf,
  bytes,
  type Fixture,
  fulfilled,
  nextOf,
  pattern,
  readOf,
  text,
} from "./fixture.js";

export function abortAndCloseTests(fixture: Fixture): void {
  const { waitFor } = fixture;
  const lengthBytes = (): number => fixture.options.bigLengthBytes ?? 32 << 20;

  async function bigTransfer(give: {
    signal?: AbortSignal;
    timeoutMs?: number;
    notification?: Uint8Array;
  }) {
    const { reader, owner, local, remote } = await blockPair(fixture, lengthBytes(), 4096);
    const ids = Int32Array.from({ length: lengthBytes() / 4096 }, (_, index) => index);
    const transfer = reader.agent.transfer({ ...readOf({ local, remote }, ids), ...give });
    return { reader, owner, local, transfer };
  }

  /** Returns "done" or the code of the error. */
  function outcomeOf({ done }: Transfer): Promise<string> {
    return waitFor(
      done.then(
        () => "done",
        (error: unknown) => (KvError.is(error) ? error.code : String(error)),
      ),
    );
  }

  /** Checks what every outcome guarantees. */
  async function expectOrderlyEnd(
    ended: Awaited<ReturnType<typeof bigTransfer>>,
    outcome: string,
  ): Promise<void> {
    const { reader, owner, transfer } = ended;
    await waitFor(transfer.released);
    // After `released` the transfer must not write into the memory any more.
    reader.memory.bytes.fill(0xee);
    const arrived = owner.agent.notifications();
    for (let round = 0; round < 20; round++) {
      await waitFor(reader.agent.notify(owner.agent.name, bytes(`marker ${round}`)));
      const first = text((await nextOf(fixture, arrived)).payload);
      if (round === 0 && outcome === "done") {
        expect(first).toBe("notification");
        expect(text((await nextOf(fixture, arrived)).payload)).toBe("marker 0");
      } else expect(first).toBe(`marker ${round}`);
    }
    expect(Buffer.compare(reader.memory.bytes, Buffer.alloc(reader.memory.lengthBytes, 0xee))).toBe(
      0,
    );
    expect(reader.agent.telemetry().transfersInFlight).toBe(0);
  }

  test("an immediate abort rejects `done`, `released` resolves, and no notification arrives", async () => {
    // Where another thread moves the bytes, the transfer may finish before this thread aborts it.
    // That is rare, so ten attempts are enough.
    const attempts = fixture.options.transfersTakeTime === true ? 1 : 10;
    let outcome = "done";
    for (let attempt = 0; attempt < attempts && outcome === "done"; attempt++) {
      const controller = new AbortController();
      const ended = await bigTransfer({
        signal: controller.signal,
        notification: bytes("notification"),
      });
      controller.abort(new Error("the client went away"));
      outcome = await outcomeOf(ended.transfer);
      await expectOrderlyEnd(ended, outcome);
    }
    expect(outcome).toBe("KV_TRANSFER_ABORTED");
  });

  test("after an abort during the transfer, a notification arrives only if the transfer succeeded", async () => {
    const controller = new AbortController();
    const ended = await bigTransfer({
      signal: controller.signal,
      notification: bytes("notification"),
    });
    const begun = (): boolean => ended.reader.memory.bytes[0] === ended.owner.memory.bytes[0];
    const settled = fulfilled(ended.transfer.done.catch(() => {}));
    while (!begun() && !settled()) await fixture.turn();
    controller.abort();
    const outcome = await outcomeOf(ended.transfer);
    expect(["done", "KV_TRANSFER_ABORTED"]).toContain(outcome);
    await expectOrderlyEnd(ended, outcome);
  });

  test("an abort after the end has no effect", async () => {
    const controller = new AbortController();
    const { transfer } = await bigTransfer({ signal: controller.signal });
    const result = await waitFor(transfer.done);
    controller.abort();
    expect(await transfer.done).toBe(result);
  });

  test("a timeout rejects `done` with KV_TRANSFER_TIMEOUT", async () => {
    const ended = await bigTransfer({ timeoutMs: 0.001, notification: bytes("notification") });
    const outcome = await outcomeOf(ended.transfer);
    const possible = fixture.options.transfersTakeTime === true ? [] : ["done"];
    expect([...possible, "KV_TRANSFER_TIMEOUT"]).toContain(outcome);
    await expectOrderlyEnd(ended, outcome);
  });

  test("the memory of an aborted transfer stays in use until it is released", async () => {
    const controller = new AbortController();
    const { reader, local, transfer } = await bigTransfer({ signal: controller.signal });
    const { done, released } = transfer;
    const wasReleased = fulfilled(released);
    controller.abort();
    const closed = local.close();
    let early = false;
    void closed.then(() => {
      early = !wasReleased();
    });
    await waitFor(done.catch(() => {}));
    await waitFor(closed);
    expect(early).toBe(false);
    expect(wasReleased()).toBe(true);
    await waitFor(reader.registration.close());
  });

  test("closing an agent with transfers in flight settles and releases them", async () => {
    const { reader, transfer } = await bigTransfer({});
    const outcome = outcomeOf(transfer);
    const wasReleased = fulfilled(transfer.released);
    await waitFor(reader.agent.close());
    expect(wasReleased()).toBe(true);
    expect(["done", "KV_TRANSFER_ABORTED", "KV_AGENT_CLOSED"]).toContain(await outcome);
    reader.memory.close();
  });

  test("an agent closes twice, releases its memory, and rejects later calls", async () => {
    const { reader, owner, local, remote } = await blockPair(fixture, 8192, 1024);
    const { agent, memory } = reader;
    const metadata = await waitFor(owner.agent.localMetadata());
    await Promise.all([waitFor(agent.close()), waitFor(agent.close())]);
    await waitFor(agent.close());
    const table = { memoryType: memory.memoryType, rows: blocksOf(memory, 1024) };
    await expectError(() => agent.register(memory), "KV_AGENT_CLOSED");
    await expectError(() => agent.localMetadata(), "KV_AGENT_CLOSED");
    await expectError(() => agent.addRemote(metadata), "KV_AGENT_CLOSED");
    await expectError(() => agent.removeRemote(owner.agent.name), "KV_AGENT_CLOSED");
    await expectError(() => agent.prepareLocal(table), "KV_AGENT_CLOSED");
    await expectError(() => agent.prepareRemote(owner.agent.name, table), "KV_AGENT_CLOSED");
    await expectError(() => agent.notify(owner.agent.name, bytes("x")), "KV_AGENT_CLOSED");
    expectThrown(
      () => agent.transfer(readOf({ local, remote }, Int32Array.of(0))),
      "KV_AGENT_CLOSED",
    );
    await waitFor(local.close());
    await waitFor(remote.close());
    await waitFor(reader.registration.close());
    memory.close();
    expect(owner.memory.bytes[9]).toBe(pattern(8192, 1)[9]);
  });

  test("the transport closes its agents, closes twice, and creates no agent afterwards", async () => {
    const transport = await fixture.options.create();
    const memory = transport.allocate(4096);
    const agent = await waitFor(transport.createAgent({ ...fixture.options.agentOptions }));
    await waitFor(agent.register(memory));
    await waitFor(transport.close());
    await waitFor(transport.close());
    await expectError(
      () => waitFor(transport.createAgent({ ...fixture.options.agentOptions })),
      "KV_TRANSPORT_CLOSED",
    );
    await expectError(() => agent.localMetadata(), "KV_AGENT_CLOSED");
    memory.close();
  });
}
