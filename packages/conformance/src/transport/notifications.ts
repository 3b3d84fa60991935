import { expect, test } from "vitest";
import { expectThrown } from "../expect-error.js";
import { bytes, expectBytes, type Fixture, idsBelow, pattern, readOf } from "./fixture.js";

export function notificationTests(fixture: Fixture): void {
  const { waitFor, rejects } = fixture;

  test("notifications arrive in order, byte for byte, with the sender's name", async () => {
    const [one, two] = await fixture.agents();
    const payloads = Array.from({ length: 100 }, (_, index) =>
      pattern(1 + ((index * 37) % 2000), index),
    );
    const binary = Uint8Array.of(0, 255, 0, 10, 13, 0);
    for (const payload of [...payloads, binary]) {
      const sent = payload.slice();
      const taken = one.notify(two.name, sent);
      // The call copied the payload.
      sent.fill(0);
      await waitFor(taken);
    }
    const arrived = two.notifications();
    for (const payload of [...payloads, binary]) {
      const { from, payload: got } = await fixture.nextOf(arrived);
      expect(from).toBe(one.name);
      expectBytes(got, payload);
    }
    expect(one.telemetry().notificationsSent).toBe(101);
    expect(two.telemetry().notificationsReceived).toBe(101);
  });

  test("a notification sent just before the agent closes arrives, also as the first one to that peer", async () => {
    const [one, two] = await fixture.agents();
    await waitFor(one.notify(two.name, bytes("last")));
    await waitFor(one.close());
    expect(await fixture.nextText(two.notifications())).toBe("last");
  });

  test("only one iterator may be open; notifications that arrive without one are kept", async () => {
    const [one, two] = await fixture.agents();
    for (const word of ["a", "b", "c"]) await waitFor(one.notify(two.name, bytes(word)));
    const first = two.notifications();
    expect(await fixture.nextText(first)).toBe("a");
    expectThrown(() => two.notifications(), "KV_NOTIFICATION_INVALID", "KV_AGENT_INVALID");
    await first.return?.();
    expect((await first.next()).done).toBe(true);
    const second = two.notifications();
    for (const word of ["b", "c"]) expect(await fixture.nextText(second)).toBe(word);
    const waiting = second.next();
    await waitFor(one.notify(two.name, bytes("d")));
    expect((await waitFor(waiting)).value.payload).toEqual(bytes("d"));
  });

  test("the iterator ends when the agent closes, also while it waits", async () => {
    const agent = await fixture.agent();
    const iterator = agent.notifications();
    const waiting = iterator.next();
    await waitFor(agent.close());
    expect((await waitFor(waiting)).done).toBe(true);
    expect((await waitFor(iterator.next())).done).toBe(true);
  });

  test("the notification of a transfer arrives exactly once, after its last byte", async () => {
    const lengthBytes = 8 << 20;
    const { reader, owner, local, remote } = await fixture.blockPair(lengthBytes, 16_384, 20);
    const ids = idsBelow(lengthBytes / 16_384);
    const arrived = owner.agent.notifications();
    for (const operation of fixture.operations.toReversed()) {
      reader.memory.bytes.set(pattern(lengthBytes, 20));
      owner.memory.bytes.set(pattern(lengthBytes, 21));
      const sent = bytes(`payload of ${operation}`);
      const request = { ...readOf({ local, remote }, ids), operation, notification: sent };
      const { done } = reader.agent.transfer(request);
      sent.fill(0);
      const { from, payload } = await fixture.nextOf(arrived);
      // Checked when the owner receives it.
      expectBytes(reader.memory.bytes, owner.memory.bytes);
      expect(
        Buffer.compare(owner.memory.bytes, pattern(lengthBytes, operation === "WRITE" ? 20 : 21)),
      ).toBe(0);
      expect([from, payload]).toEqual([reader.agent.name, bytes(`payload of ${operation}`)]);
      await waitFor(done);
      await waitFor(reader.agent.notify(owner.agent.name, bytes("marker")));
      expect(await fixture.nextText(arrived)).toBe("marker");
    }
  });

  test("no notification arrives for a transfer that failed", async () => {
    const { reader, owner, local, remote } = await fixture.blockPair(8192, 1024);
    const { done, released } = reader.agent.transfer({
      ...readOf({ local, remote }, Int32Array.of(0, 1)),
      notification: bytes("never"),
      signal: AbortSignal.abort(),
    });
    await rejects(() => done, "KV_TRANSFER_ABORTED");
    await waitFor(released);
    await waitFor(reader.agent.notify(owner.agent.name, bytes("marker")));
    expect(await fixture.nextText(owner.agent.notifications())).toBe("marker");
  });
}
