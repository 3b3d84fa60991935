import { KvError, type Transfer, type TransferRequest } from "@kv/interface";
import { expect, test } from "vitest";
import { expectError, expectThrown } from "../expect-error.js";
import {
  blockTable,
  bytes,
  expectBytes,
  type Fixture,
  fulfilled,
  idsBelow,
  pattern,
  readOf,
} from "./fixture.js";

export function abortAndCloseTests(fixture: Fixture): void {
  const { waitFor, rejects } = fixture;
  const lengthBytes = (): number => fixture.options.bigLengthBytes ?? 32 << 20;

  async function bigTransfer(
    give: Pick<TransferRequest, "signal" | "timeoutMs" | "notification"> = {},
  ) {
    const { reader, owner, local, remote } = await fixture.blockPair(lengthBytes(), 4096);
    const ids = idsBelow(lengthBytes() / 4096);
    const transfer = reader.agent.transfer({ ...readOf({ local, remote }, ids), ...give });
    return { reader, owner, local, transfer };
  }

  /** "done" or the error's code. */
  function outcomeOf({ done }: Transfer): Promise<string> {
    return waitFor(
      done.then(
        () => "done",
        (error: unknown) => (KvError.is(error) ? error.code : String(error)),
      ),
    );
  }

  async function expectOrderlyEnd(
    ended: Awaited<ReturnType<typeof bigTransfer>>,
    outcome: string,
  ): Promise<void> {
    const { reader, owner, transfer } = ended;
    await waitFor(transfer.released);
    // After `released`, nothing may write into the memory.
    reader.memory.bytes.fill(0xee);
    const arrived = owner.agent.notifications();
    for (let round = 0; round < 20; round++) {
      await waitFor(reader.agent.notify(owner.agent.name, bytes(`marker ${round}`)));
      if (round === 0 && outcome === "done")
        expect(await fixture.nextText(arrived)).toBe("notification");
      expect(await fixture.nextText(arrived)).toBe(`marker ${round}`);
    }
    expectBytes(reader.memory.bytes, Buffer.alloc(reader.memory.lengthBytes, 0xee));
    expect(reader.agent.telemetry().transfersInFlight).toBe(0);
  }

  test("an immediate abort rejects `done`, `released` resolves, and no notification arrives", async () => {
    // Another thread rarely finishes the transfer before the abort, so ten attempts are enough.
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
    const wasReleased = fulfilled(transfer.released);
    controller.abort();
    const whenClosed = local.close().then(wasReleased);
    await waitFor(transfer.done.catch(() => {}));
    expect(await waitFor(whenClosed)).toBe(true);
    await waitFor(reader.registration.close());
  });

  test("closing an agent with transfers in flight settles and releases them", async () => {
    const { reader, transfer } = await bigTransfer();
    const outcome = outcomeOf(transfer);
    const wasReleased = fulfilled(transfer.released);
    await waitFor(reader.agent.close());
    expect(wasReleased()).toBe(true);
    expect(["done", "KV_TRANSFER_ABORTED", "KV_AGENT_CLOSED"]).toContain(await outcome);
    reader.memory.close();
  });

  test("an agent closes twice, releases its memory, and rejects later calls", async () => {
    const { reader, owner, local, remote } = await fixture.blockPair(8192, 1024);
    const { agent, memory } = reader;
    const metadata = await waitFor(owner.agent.localMetadata());
    await Promise.all([waitFor(agent.close()), waitFor(agent.close())]);
    await waitFor(agent.close());
    const table = blockTable(memory, 1024);
    const peer = owner.agent.name;
    for (const call of [
      () => agent.register(memory),
      () => agent.localMetadata(),
      () => agent.addRemote(metadata),
      () => agent.removeRemote(peer),
      () => agent.prepareLocal(table),
      () => agent.prepareRemote(peer, table),
      () => agent.notify(peer, bytes("x")),
    ])
      await expectError(call, "KV_AGENT_CLOSED");
    const request = readOf({ local, remote }, idsBelow(1));
    expectThrown(() => agent.transfer(request), "KV_AGENT_CLOSED");
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
    await rejects(
      () => transport.createAgent({ ...fixture.options.agentOptions }),
      "KV_TRANSPORT_CLOSED",
    );
    await expectError(() => agent.localMetadata(), "KV_AGENT_CLOSED");
    memory.close();
  });
}
