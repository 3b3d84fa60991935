import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterEach, describe, expect, test } from "vitest";
import { faults } from "../support/fake-faults.js";
import { pairOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";

const LENGTH = 1 << 20;
const BLOCK = 16_384;

/** A WRITE that is reported as done when its bytes have left, as by libfabric over TCP. */
describe.skipIf(fakeMissing)(`writes that land late (${fakeMissing ?? "fake found"})`, () => {
  afterEach(() => faults());

  test.each([
    { name: "with a notification", notification: Buffer.from("landed"), abort: false },
    { name: "aborted", notification: undefined, abort: true },
  ])("are released only when they have landed, $name", async ({ notification, abort }) => {
    faults({ LATE_WRITES: 1 });
    const transport = nixlTransport({ library: FAKE_NIXL, backends: ["LIBFABRIC"] });
    const { target, source, move, close } = await pairOf(transport, LENGTH, BLOCK);
    target.bytes.fill(9);
    const controller = new AbortController();
    const more = { notification, signal: controller.signal };
    const { done, released } = move("WRITE", scattered(LENGTH / BLOCK), more);
    if (abort) controller.abort();
    await done.catch(() => {});
    await released;
    // Aborted before its start it wrote nothing; aborted later it wrote everything.
    const landed = source.bytes.filter((byte) => byte === 9).length;
    expect([abort ? 0 : LENGTH, LENGTH]).toContain(landed);
    await close();
  });
});
