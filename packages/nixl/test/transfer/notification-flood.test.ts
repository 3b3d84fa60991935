import { setImmediate as turn } from "node:timers/promises";
import { type LogFields, noMetrics, silentLog } from "@kv/interface";
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

  test("without a reader: all senders together have a limit, each a quarter of it, in notifications and in bytes", async () => {
    const dropped = new Map<string, number>();
    const warn = (_event: string, { senders = {} }: LogFields = {}) => {
      for (const [name, count] of Object.entries(senders as Record<string, number>))
        dropped.set(name, (dropped.get(name) ?? 0) + count);
    };
    let lost = 0;
    const count = (name: string, value = 1) => {
      if (name === "kv_nixl_notifications_dropped") lost += value;
    };
    await using transport = nixlTransport({
      library: FAKE_NIXL,
      log: { ...silentLog, warn },
      metrics: { ...noMetrics, count },
    });
    const [full, few] = [await transport.createAgent(), await transport.createAgent()];
    const names = ["a", "b", "c", "d", "e"];
    for (const name of names) {
      const sender = await transport.createAgent({ name });
      await sender.addRemote(await full.localMetadata());
      const length = name === "e" ? 2 : KEPT + 1;
      await Promise.all(Array.from({ length }, () => sender.notify(full.name, new Uint8Array(1))));
    }
    const long = await transport.createAgent({ name: "long" });
    await long.addRemote(await few.localMetadata());
    for (let at = 0; at < 3; at++) await long.notify(few.name, new Uint8Array(8 << 20));
    await expect.poll(() => lost, { timeout: 10_000 }).toBe(7);
    await few.close();
    await full.close();
    expect(Object.fromEntries(dropped)).toEqual({ a: 1, b: 1, c: 1, d: 1, e: 2, long: 1 });
  });
});
