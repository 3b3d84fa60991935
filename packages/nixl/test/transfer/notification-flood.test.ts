import { setImmediate as turn } from "node:timers/promises";
import { type LogFields, silentLog } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { describe, expect, test } from "vitest";

const SENT = 40_000;
/** A quarter of 65,536, which one sender may have. */
const KEPT = 16_384;

describe.skipIf(fakeMissing)(`a peer that floods (${fakeMissing ?? "fake found"})`, () => {
  test("while JavaScript does not run: a quarter of the limit is kept, and the rest is reported", async () => {
    const warnings: LogFields[] = [];
    const warn = (event: string, fields: LogFields = {}) =>
      void warnings.push({ event, ...fields });
    await using transport = nixlTransport({ library: FAKE_NIXL, log: { ...silentLog, warn } });
    const [receiver, loud, quiet] = [
      await transport.createAgent(),
      await transport.createAgent({ name: "loud" }),
      await transport.createAgent({ name: "quiet" }),
    ];
    const metadata = await receiver.localMetadata();
    for (const sender of [loud, quiet]) await sender.addRemote(metadata);
    const sent = Array.from({ length: SENT }, (_, at) =>
      loud.notify(receiver.name, Buffer.from(`${at}`)),
    );
    // The agents' threads go on meanwhile.
    while (loud.telemetry().notificationsSent < SENT) {}
    const last = quiet.notify(receiver.name, Buffer.from("last"));
    while (receiver.telemetry().notificationsReceived < SENT + 1) {}

    const names: string[] = [];
    let mostInOneTurn = 0;
    const reading = (async () => {
      for await (const { from, payload } of receiver.notifications()) {
        const text = Buffer.from(payload).toString();
        if (from === "loud") expect(text).toBe(`${names.length}`);
        names.push(from);
        if (from === "quiet") break;
      }
    })();
    for (let before = 0; names.at(-1) !== "quiet"; before = names.length) {
      await turn();
      mostInOneTurn = Math.max(mostInOneTurn, names.length - before);
    }
    await Promise.all([...sent, last, reading]);
    expect(names.length).toBe(KEPT + 1);
    expect(mostInOneTurn).toBeLessThanOrEqual(2 * 1024);
    await expect
      .poll(() => warnings)
      .toContainEqual(
        expect.objectContaining({
          event: "nixl-notifications-dropped",
          agent: receiver.name,
          senders: { loud: SENT - KEPT },
          otherSenders: 0,
        }),
      );
  });
});
