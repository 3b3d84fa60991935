import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterEach, describe, expect, test } from "vitest";

const LENGTH = 1 << 20;
const BLOCK = 16_384;

/** A WRITE that is reported as done when its bytes have left, as by libfabric over TCP. */
describe.skipIf(fakeMissing)(`writes that land late (${fakeMissing ?? "fake found"})`, () => {
  afterEach(() => {
    delete process.env.FAKE_NIXL_LATE_WRITES;
  });

  test.each([
    { name: "with a notification", notification: Buffer.from("landed"), abort: false },
    { name: "aborted", notification: undefined, abort: true },
  ])("are released only when they have landed, $name", async ({ notification, abort }) => {
    process.env.FAKE_NIXL_LATE_WRITES = "1";
    const transport = nixlTransport({ library: FAKE_NIXL, backends: ["LIBFABRIC"] });
    const [writer, owner] = [await transport.createAgent(), await transport.createAgent()];
    const [source, target] = [transport.allocate(LENGTH), transport.allocate(LENGTH)];
    source.bytes.fill(9);
    await writer.register(source);
    await owner.register(target);
    await writer.addRemote(await owner.localMetadata());
    const rows = (base: number) => Float64Array.of(base, BLOCK, 0, BLOCK, LENGTH / BLOCK);
    const local = await writer.prepareLocal({ memoryType: "DRAM", rows: rows(source.address) });
    const remote = await writer.prepareRemote(owner.name, {
      memoryType: "DRAM",
      rows: rows(target.address),
    });
    const ids = Int32Array.from({ length: LENGTH / BLOCK }, (_, index) => index);
    const controller = new AbortController();
    const { done, released } = writer.transfer({
      operation: "WRITE",
      local,
      localIds: ids,
      remote,
      remoteIds: ids,
      ...(notification === undefined ? {} : { notification }),
      signal: controller.signal,
    });
    if (abort) controller.abort();
    await done.catch(() => {});
    await released;
    // Aborted before its start it wrote nothing; aborted later it wrote everything.
    const landed = target.bytes.filter((byte) => byte === 9).length;
    expect([abort ? 0 : LENGTH, LENGTH]).toContain(landed);
    await transport.close();
    source.close();
    target.close();
  });
});
